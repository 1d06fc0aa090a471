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

WIDTH = 32
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


def nearest_heavier(sketch: Tensor, mass: Tensor, share: Tensor, orders: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Search all blocks of all orders.

    Args:
        sketch: `[n, rows, C]`.
        mass: `[n, rows]` int64. One is heavier than another if it has more mass, or as much and a lower slot.
        share: `[n, rows]` float32, 1 / weight.
        orders: `[n, o, rows]` int64, all slots in each.
        size: F, of the sketch.

    Returns:
        Of each slot the bits of its least cost, `[n, rows]` int32, and whose it is, `[n, rows]` int64; of equal ones
        in several orders the first one's.
    """
    n, o, rows = orders.shape
    width = width_of(rows)
    low = width - 1
    device = orders.device
    orders = _heaviest_first(orders, mass, width)
    flat = (orders + torch.arange(n, device=device)[:, None, None] * rows).view(-1)
    sketch, share = sketch.view(n * rows, -1), share.reshape(-1)
    # The heavier ones of a block are those before it: their columns' numbers, and all bits set elsewhere.
    column = torch.arange(width, dtype=torch.int32, device=device).expand(width, -1)
    column = torch.where(column < column.t(), column, NONE)
    best = torch.empty(n * o * rows, dtype=torch.int32, device=device)
    for part in parts_of(n * o * rows, device, width):
        own = flat[part]
        points = sketch.index_select(0, own).view(-1, width, sketch.shape[1])
        shares = share.index_select(0, own).view(-1, width)
        squares = torch.bmm(turned(points, size), points.transpose(1, 2))
        cost = torch.div(squares, shares[:, :, None] + shares[:, None])
        # Rounding can leave a square below 0, whose bits are negative.
        bits = cost.view(torch.int32).clamp_(min=0).bitwise_and_(~low).bitwise_or_(column)
        best[part] = bits.amin(2).view(-1)
    best = best.view(n, o, rows)
    place = torch.arange(rows, device=device)
    partners = orders.gather(2, (best & low) + (place - place % width))
    costs = torch.empty_like(best).scatter_(2, orders, best & ~low)
    partners = torch.empty_like(orders).scatter_(2, orders, partners)
    bits, partner = costs[:, 0], partners[:, 0]
    for other in range(1, o):
        nearer = costs[:, other] < bits
        bits, partner = torch.where(nearer, costs[:, other], bits), torch.where(nearer, partners[:, other], partner)
    return bits, partner


def _heaviest_first(orders: Tensor, mass: Tensor, width: int) -> Tensor:
    """The same blocks, each from heavy to light, and by slot where masses are equal."""
    n, o, rows = orders.shape
    blocks = orders.view(n, o, -1, width).sort(3).values
    masses = mass[:, None].expand(n, o, rows).gather(2, blocks.view(n, o, rows)).view_as(blocks)
    return blocks.gather(3, masses.argsort(dim=3, descending=True, stable=True)).view(n, o, rows)
