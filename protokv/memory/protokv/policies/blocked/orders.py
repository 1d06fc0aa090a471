"""Two orders of the prototypes of a head that put next to each other what is likely to be merged.

By place and time: the cell of a 16 x 16 grid that the mean coordinates fall into, cells in Morton's order, and in a
cell by the last step. It finds what stands still. By content: the nearest of a few prototypes, the pivots, and the
distance to it. It finds what moved. Slots that hold nothing are last.
"""

from __future__ import annotations

import torch
from torch import Tensor

from protokv.memory.protokv.policies.blocked.parts import parts_of
from protokv.memory.protokv.policies.blocked.sketch import turned

PIVOTS = 64
_SIDE = 16
_LAST = torch.iinfo(torch.int64).max


def by_place(mean: Tensor, last_step: Tensor, free: Tensor, cells: Tensor) -> Tensor:
    """Slots `[n, K]` in order of place and time, of `mean` `[n, K, 2]` in [0, 1] and `last_step` `[n, K]` int64.

    `cells` is of `cells_of`.
    """
    x, y = (mean * _SIDE).long().clamp_(0, _SIDE - 1).unbind(2)
    place = cells.take(x + _SIDE * y)
    return ((place << 40) | last_step).masked_fill_(free, _LAST).argsort(dim=1, stable=True)


def by_content(sketch: Tensor, free: Tensor, size: int) -> Tensor:
    """Slots `[n, K]` in order of their nearest pivot and of how near it is; `free` is `[n, K]`, `size` F."""
    n, K = free.shape
    count = min(PIVOTS, K)
    pivots = turned(sketch[:, : K // count * count : K // count], size).transpose(1, 2).contiguous()
    number = torch.arange(count, dtype=torch.int32, device=sketch.device)
    best = torch.empty(n, K, dtype=torch.int32, device=sketch.device)
    for part in parts_of(K, sketch.device):
        # Floats that are not negative are ordered as their bits are, so bits and number in one: argmin in one pass.
        bits = torch.bmm(sketch[:, part], pivots).view(torch.int16).clamp_(min=0)
        best[:, part] = bits.int().mul_(PIVOTS).add_(number).amin(2)
    key = ((best % PIVOTS).long() << 32) | (best // PIVOTS)
    return key.masked_fill_(free, _LAST).argsort(dim=1, stable=True)


def cells_of(device: torch.device) -> Tensor:
    """Morton's number of each cell of the grid, row after row: the bits of x and y in turn. `[256]` int64."""
    bits = torch.arange(_SIDE)
    spread = torch.zeros_like(bits)
    for bit in range(4):
        spread |= (bits >> bit & 1) << 2 * bit
    return (spread[None] | spread[:, None] << 1).flatten().to(device)
