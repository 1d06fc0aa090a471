"""Two orders of the prototypes of a head that put next to each other what is likely to be merged.

By place and time: the cell of a 16 x 16 grid that the mean coordinates fall into, cells in Morton's order, and in a
cell by the last step. It finds what stands still. By content: the nearest of a few prototypes, the pivots, and the
distance to it. It finds what moved. Free slots stand where their zeros put them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from protokv.memory.protokv.policies.blocked.parts import SLOT_BITS, parts_of
from protokv.memory.protokv.policies.blocked.sketch import Sketch
from protokv.memory.sorting import sorted_from

PIVOTS = 64
_SIDE = 16
_PIVOT_BITS = 6
# Squared distances of sketches are below 2 ** 23, steps below 2 ** 35. With those of a slot and of a cell: 63.
_SQUARE_BITS, _STEP_BITS = 23, 35


@dataclass(frozen=True, slots=True)
class OrderTables:
    """Constants.

    Attributes:
        cells: Morton's number of each cell of the grid, the bits of x and y in turn, times 2 ** 35: `[17 * 17]` int64,
            one row of cells behind the other, the last of a row and of a column twice: the far edge is theirs.
        numbers: of the pivots, `[64]` int32.
    """

    cells: Tensor
    numbers: Tensor

    @classmethod
    def of(cls, device: torch.device) -> OrderTables:
        """The constants."""
        bits = torch.arange(_SIDE + 1).clamp_(max=_SIDE - 1)
        spread = torch.zeros_like(bits)
        for bit in range(4):
            spread |= (bits >> bit & 1) << 2 * bit
        cells = (spread[None] | spread[:, None] << 1) << _STEP_BITS
        return cls(cells.view(-1).to(device), torch.arange(PIVOTS, dtype=torch.int32, device=device))


def orders_of(sketch: Sketch, mean: Tensor, last_step: Tensor, line: Tensor, tables: OrderTables) -> Tensor:
    """Both orders.

    Args:
        sketch: of n heads.
        mean: `[n, K, 2]` float32, coordinates in [0, 1].
        last_step: `[n, K]` int64.
        line: `[K]` int64, 0, 1, ...
        tables: constants.

    Returns:
        All slots by place and by content, `[n, 2, K]` int64; of equal ones the first.
    """
    places = torch.empty(len(mean), 2, len(line), dtype=line.dtype, device=line.device)
    _by_place(mean, last_step, tables.cells, places[:, 0])
    _by_content(sketch, tables.numbers, places[:, 1])
    return sorted_from(torch.add(line, places, alpha=1 << SLOT_BITS)).bitwise_and_((1 << SLOT_BITS) - 1)


def _by_place(mean: Tensor, last_step: Tensor, cells: Tensor, out: Tensor) -> None:
    """Where each slot stands in order of place and time, `[n, K]` int64."""
    x, y = (mean * _SIDE).long().unbind(2)
    cell = torch.add(x, y, alpha=_SIDE + 1)
    torch.add(cells.index_select(0, cell.view(-1)).view_as(cell), last_step, out=out)


def _by_content(sketch: Sketch, numbers: Tensor, out: Tensor) -> None:
    """Where each slot stands in order of its nearest pivot, of equally near ones the first, and of how near it is:
    `[n, K]` int64."""
    K = sketch.points.shape[1]
    count = min(PIVOTS, K)
    some = slice(0, K // count * count, K // count)
    # A squared distance, less what is the same for all pivots, above the number of the pivot: the least tells both.
    norms, pivots = sketch.norms.int(), (sketch.points[:, some] * -float(2 << _PIVOT_BITS)).transpose(1, 2)
    offsets = torch.add(numbers[:count], norms[:, None, some], alpha=1 << _PIVOT_BITS)
    nearest = torch.empty_like(norms)
    for part in parts_of(K, norms.device):
        distances = torch.bmm(sketch.points[:, part].float(), pivots).int().add_(offsets)
        torch.amin(distances, 2, out=nearest[:, part])
    squares = norms.add_(nearest >> _PIVOT_BITS)
    torch.add(squares, nearest.bitwise_and_((1 << _PIVOT_BITS) - 1), alpha=1 << _SQUARE_BITS, out=out)
