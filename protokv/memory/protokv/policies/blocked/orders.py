"""Two orders of the prototypes of a head that put next to each other what is likely to be merged.

By place and time: the cell of a 16 x 16 grid that the mean coordinates fall into, cells in Morton's order, and in a
cell by the last step. It finds what stands still. By content: the nearest of a few prototypes, the pivots, and the
distance to it. It finds what moved. Free slots stand where their zeros put them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from protokv.memory.protokv.policies.blocked.parts import parts_of

PIVOTS = 64
_SIDE = 16
# Steps are below 2 ** 40; the bits of a pivot's number, and one to spare.
_STEP_BITS, _NUMBER_BITS = 40, 7


def by_place(mean: Tensor, last_step: Tensor, cells: Tensor) -> Tensor:
    """Slots `[n, K]` in order of place and time, of `mean` `[n, K, 2]` in [0, 1] and `last_step` `[n, K]` int64.

    `cells` is of `cells_of`.
    """
    x, y = (mean * _SIDE).clamp_(0, _SIDE - 1).long().unbind(2)
    return (cells[y, x] + last_step).argsort(dim=1, stable=True)


def by_content(sketch: Tensor, prototypes: int, numbers: Tensor) -> Tensor:
    """Slots `[n, K]` in order of their nearest pivot, of equally near ones the first, and of how near it is; `numbers`
    is of `numbers_of`."""
    n, K = sketch.shape[1], prototypes
    count = len(numbers)
    pivots = sketch[1, :, : K // count * count : K // count].transpose(1, 2)
    best = torch.empty(n, K, dtype=torch.int32, device=sketch.device)
    for part in parts_of(K, sketch.device):
        # Floats that are not negative are ordered as their bits are, so bits and number in one: argmin in one pass.
        bits = torch.bmm(sketch[0, :, part], pivots).view(torch.int16)
        torch.amin(torch.add(numbers, bits, alpha=1 << _NUMBER_BITS), 2, out=best[:, part])
    # The number moves to the top, and the bits of the distance move down.
    return ((best << (32 - _NUMBER_BITS)) | (best >> _NUMBER_BITS)).argsort(dim=1, stable=True)


def numbers_of(prototypes: int, device: torch.device) -> Tensor:
    """Of the pivots of K prototypes, from 0: int32."""
    return torch.arange(min(PIVOTS, prototypes), dtype=torch.int32, device=device)


def cells_of(device: torch.device) -> Tensor:
    """Morton's number of each cell of the grid, the bits of x and y in turn, times 2 ** 40: `[16, 16]` int64 by y and
    x."""
    bits = torch.arange(_SIDE)
    spread = torch.zeros_like(bits)
    for bit in range(4):
        spread |= (bits >> bit & 1) << 2 * bit
    return ((spread[None] | spread[:, None] << 1) << _STEP_BITS).to(device)
