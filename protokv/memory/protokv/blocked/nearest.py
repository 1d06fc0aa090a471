"""The nearest neighbour of each prototype by Ward's cost, among those of its block of an order.

A cost is a float32 that is not negative, rounded down to the bits that a column's number leaves free: so a cost and
the column that it is found in are one int32, and the least of them is found in one pass; of equal ones the first
column's. Knows nothing of what an order means.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from protokv.memory.protokv.blocked.parts import parts_of
from protokv.memory.protokv.blocked.sketch import turned

WIDTH = 64
"""Prototypes of a block, at most; a power of two."""
NONE = torch.iinfo(torch.int32).max
"""The bits of a cost where there is no neighbour."""


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The nearest of each slot.

    Attributes:
        bits: `[n, rows]` int32, the cost's bits.
        partner: `[n, rows]` int64, the slot.
        before: `[n, rows // 2]` int32, the bits of the cost of the 2nd, 4th, ... of the order and the one before it.
    """

    bits: Tensor
    partner: Tensor
    before: Tensor


def width_of(prototypes: int) -> int:
    """The block's width for K prototypes."""
    return min(WIDTH, max(2, 1 << (prototypes - 1).bit_length()))


def rows_of(prototypes: int) -> int:
    """Rows of a sketch of K prototypes: whole blocks."""
    width = width_of(prototypes)
    return -(-prototypes // width) * width


def nearest(sketch: Tensor, share: Tensor, order: Tensor, size: int) -> Neighbours:
    """Search all blocks.

    Args:
        sketch: `[n, rows, C]`.
        share: `[n, rows]` float32, 1 / weight.
        order: `[n, rows]` int64, all slots.
        size: D.
    """
    n, rows = order.shape
    width = width_of(rows)
    low = width - 1
    device = order.device
    flat = (order + torch.arange(n, device=device)[:, None] * rows).view(-1)
    sketch, share = sketch.view(n * rows, -1), share.reshape(-1)
    column = torch.arange(width, dtype=torch.int32, device=device)
    best = torch.empty(n * rows, dtype=torch.int32, device=device)
    before = torch.empty(n * rows // 2, dtype=torch.int32, device=device)
    for part in parts_of(n * rows, device, width):
        own = flat[part]
        points = sketch.index_select(0, own).view(-1, width, sketch.shape[1])
        shares = share.index_select(0, own).view(-1, width)
        squares = torch.bmm(turned(points, size), points.transpose(1, 2))
        cost = torch.div(squares, shares[:, :, None] + shares[:, None])
        # Rounding can leave a square below 0, whose bits are negative.
        bits = cost.view(torch.int32).clamp_(min=0).bitwise_and_(~low)
        bits.diagonal(dim1=1, dim2=2).fill_(NONE & ~low)
        before[part.start // 2 : part.stop // 2] = bits.diagonal(-1, 1, 2)[:, ::2].reshape(-1)
        best[part] = bits.bitwise_or_(column).amin(2).view(-1)
    place = torch.arange(rows, device=device)
    best = best.view(n, rows)
    partner = order.gather(1, (best & low) + (place - place % width))
    return Neighbours(
        torch.empty_like(best).scatter_(1, order, best & ~low),
        torch.empty_like(order).scatter_(1, order, partner),
        before.view(n, rows // 2),
    )
