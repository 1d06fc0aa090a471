"""Two orders of the prototypes of a head that put next to each other what is likely to be merged.

By place and time: the cell of a 16 x 16 grid that the mean coordinates fall into, cells in Morton's order, and in a
cell by the last step. It finds what stands still. By content: the nearest of a few prototypes, the pivots, and the
distance to it. It finds what moved. Free slots stand where their zeros put them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from protokv.memory.protokv.policies.blocked.parts import parts_of
from protokv.memory.protokv.policies.blocked.sketch import Sketch

PIVOTS = 64
_SIDE = 16
# Steps are below 2 ** 40, squared distances of sketches below 2 ** 23.
_STEP_BITS, _SQUARE_BITS = 40, 23


def by_place(mean: Tensor, last_step: Tensor, cells: Tensor) -> Tensor:
    """Slots `[n, K]` in order of place and time, of `mean` `[n, K, 2]` in [0, 1] and `last_step` `[n, K]` int64.

    `cells` is of `cells_of`.
    """
    x, y = (mean * _SIDE).clamp_(0, _SIDE - 1).long().unbind(2)
    return (cells[y, x] + last_step).argsort(dim=1, stable=True)


def by_content(sketch: Sketch) -> Tensor:
    """Slots `[n, K]` in order of their nearest pivot, of equally near ones the first, and of how near it is."""
    n, K, _ = sketch.points.shape
    count = min(PIVOTS, K)
    some = slice(0, K // count * count, K // count)
    pivots, offsets = sketch.points[:, some].float().transpose(1, 2), sketch.norms[:, None, some]
    found = torch.empty(n, K, dtype=torch.int64, device=offsets.device)
    for part in parts_of(K, offsets.device):
        norms = offsets + sketch.norms[:, part, None]
        squares = torch.baddbmm(norms, sketch.points[:, part].float(), pivots, alpha=-2)
        square, number = squares.min(2)
        torch.add(square.int(), number, alpha=1 << _SQUARE_BITS, out=found[:, part])
    return found.argsort(dim=1, stable=True)


def cells_of(device: torch.device) -> Tensor:
    """Morton's number of each cell of the grid, the bits of x and y in turn, times 2 ** 40: `[16, 16]` int64 by y and
    x."""
    bits = torch.arange(_SIDE)
    spread = torch.zeros_like(bits)
    for bit in range(4):
        spread |= (bits >> bit & 1) << 2 * bit
    return ((spread[None] | spread[:, None] << 1) << _STEP_BITS).to(device)
