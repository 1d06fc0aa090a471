"""The nearest heavier neighbour of each prototype by Ward's cost, among those of its block of an order.

A cost is a float32 that is not negative, rounded down to the bits that a column's number leaves free: so a cost and
the column that it is found in are one int32, and the least of them is found in one pass; of equal ones the first
column's. Knows nothing of what an order means.
"""

from __future__ import annotations

import torch
from torch import Tensor

from protokv.memory.protokv.policies.blocked.parts import parts_of
from protokv.memory.protokv.policies.blocked.sketch import turned

WIDTH = 64
"""Prototypes of a block, at most; a power of two."""
NONE = torch.iinfo(torch.int32).max
"""The bits of a cost where there is no neighbour, the lowest ones aside."""


def width_of(prototypes: int) -> int:
    """The block's width for K prototypes."""
    return min(WIDTH, max(2, 1 << (prototypes - 1).bit_length()))


def rows_of(prototypes: int) -> int:
    """Rows of a sketch of K prototypes: whole blocks."""
    width = width_of(prototypes)
    return -(-prototypes // width) * width


def nearest_heavier(sketch: Tensor, mass: Tensor, share: Tensor, order: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Search all blocks.

    Args:
        sketch: `[n, rows, C]`.
        mass: `[n, rows]` int64. One is heavier than another if it has more mass, or as much and a lower slot.
        share: `[n, rows]` float32, 1 / weight.
        order: `[n, rows]` int64, all slots.
        size: D.

    Returns:
        Of each slot the cost's bits, `[n, rows]` int32, and the heavier one, `[n, rows]` int64.
    """
    n, rows = order.shape
    width = width_of(rows)
    low = width - 1
    device = order.device
    order = _heaviest_first(order, mass, width)
    flat = (order + torch.arange(n, device=device)[:, None] * rows).view(-1)
    sketch, share = sketch.view(n * rows, -1), share.reshape(-1)
    # The heavier ones of a block are those before it: their columns' numbers, and all bits set elsewhere.
    column = torch.arange(width, dtype=torch.int32, device=device).expand(width, -1)
    column = torch.where(column < column.t(), column, NONE)
    best = torch.empty(n * rows, dtype=torch.int32, device=device)
    for part in parts_of(n * rows, device, width):
        own = flat[part]
        points = sketch.index_select(0, own).view(-1, width, sketch.shape[1])
        shares = share.index_select(0, own).view(-1, width)
        squares = torch.bmm(turned(points, size), points.transpose(1, 2))
        cost = torch.div(squares, shares[:, :, None] + shares[:, None])
        # Rounding can leave a square below 0, whose bits are negative.
        bits = cost.view(torch.int32).clamp_(min=0).bitwise_and_(~low).bitwise_or_(column)
        best[part] = bits.amin(2).view(-1)
    best = best.view(n, rows)
    place = torch.arange(rows, device=device)
    partner = order.gather(1, (best & low) + (place - place % width))
    bits = torch.empty_like(best).scatter_(1, order, best & ~low)
    return bits, torch.empty_like(order).scatter_(1, order, partner)


def _heaviest_first(order: Tensor, mass: Tensor, width: int) -> Tensor:
    """The same blocks, each from heavy to light, and by slot where masses are equal."""
    n, rows = order.shape
    block = order.view(n, rows // width, width).sort(2).values.view(n, rows)
    by_mass = mass.gather(1, block).view(n, rows // width, width).argsort(dim=2, descending=True, stable=True)
    return block.view(n, rows // width, width).gather(2, by_mass).view(n, rows)
