"""The nearest heavier neighbour of each prototype by Ward's cost, among those of its block of an order.

A cost is a float32 that is not negative, rounded down to the bits that a column's number leaves free: so a cost and
the column that it is found in are one int32, and the least of them is found in one pass; of equal ones the first
column's. Knows nothing of what an order means.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from protokv.memory.protokv.policies.blocked.parts import parts_of

WIDTH = 32
"""Prototypes of a block, at most; a power of two."""
SLOT_BITS = 20
"""A bank has fewer prototypes than 2 to this power."""
# 31 bits of a cost and its column, those of a slot and these make up an int64.
_ORIGIN_BITS = 12


def width_of(prototypes: int) -> int:
    """The block's width for K prototypes."""
    return min(WIDTH, max(2, 1 << (prototypes - 1).bit_length()))


def rows_of(prototypes: int) -> int:
    """Rows of a sketch of K prototypes: whole blocks."""
    width = width_of(prototypes)
    return -(-prototypes // width) * width


@dataclass(frozen=True, slots=True)
class BlockTables:
    """Constants of blocks of a width.

    Attributes:
        width: of a block.
        columns: of a block's rows, heaviest first, the columns that are heavier: their numbers, and all bits set
            elsewhere; `[width, width]` int32.
        starts: of each place of an order where its block begins, `[rows]` int64.
        origins: a number for each place of a block in each of two orders, `[2, rows]` int64.
        heads: where the rows of each head begin among those of all, `[heads]` int64.
    """

    width: int
    columns: Tensor
    starts: Tensor
    origins: Tensor
    heads: Tensor

    @classmethod
    def of(cls, prototypes: int, heads: int, device: torch.device) -> BlockTables:
        """The constants of so many heads of K prototypes."""
        width, rows = width_of(prototypes), rows_of(prototypes)
        column = torch.arange(width, dtype=torch.int32).expand(width, -1)
        columns = torch.where(column < column.t(), column, torch.iinfo(torch.int32).max)
        place = torch.arange(rows)
        origins = place % width + torch.tensor([[0], [width]])
        begin = torch.arange(heads) * rows
        return cls(width, *(part.to(device) for part in (columns, place - place % width, origins, begin)))


def nearest_heavier(
    sketch: Tensor, mass: Tensor, share: Tensor, orders: Tensor, line: Tensor, tables: BlockTables
) -> Tensor:
    """Search all blocks of two orders.

    Args:
        sketch: `[2, n, rows, C]`.
        mass: `[n, rows]` int64. One is heavier than another if it has more mass, or as much and a lower slot.
        share: `[n, rows]` float32, 1 / weight; where that is infinite a merge costs nothing.
        orders: `[n, 2, rows]` int64, all slots in each.
        line: `[rows]` int64, 0, 1, ...
        tables: of rows.

    Returns:
        Proposals `[n, rows]` int64: the bits of the least cost and of its column, below these the slot that it is the
        cost of going into (`partners_of`), and last what makes no two of a head equal. Of both orders the lesser.
    """
    n, o, rows = orders.shape
    width = tables.width
    low, device = width - 1, orders.device
    # Each block from heavy to light, and by slot where masses are equal: in one number, which is sorted.
    heavy = torch.sub(line, mass, alpha=1 << SLOT_BITS)[:, None].expand(n, o, rows)
    orders = heavy.gather(2, orders).view(n, o, -1, width).sort(3).values.view(n, o, rows) & ((1 << SLOT_BITS) - 1)
    flat = (orders + tables.heads[:n, None, None]).view(-1)
    sketch, share = sketch.view(2, n * rows, -1), share.view(-1)
    best = torch.empty(n * o * rows, dtype=torch.int32, device=device)
    for part in parts_of(n * o * rows, device, width):
        own = flat[part]
        points = sketch.index_select(1, own).view(2, len(own) // width, width, -1)
        shares = share.index_select(0, own).view(-1, width)
        squares = torch.bmm(points[1], points[0].transpose(1, 2))
        cost = torch.div(squares, shares[:, :, None] + shares[:, None])
        bits = cost.view(torch.int32).bitwise_and_(~low).bitwise_or_(tables.columns)
        torch.amin(bits, 2, out=best[part].view(-1, width))
    best = best.view(n, o, rows)
    partner = orders.gather(2, (best & low) + tables.starts)
    named = torch.add(tables.origins, partner, alpha=1 << _ORIGIN_BITS)
    proposals = torch.add(named, best, alpha=1 << (_ORIGIN_BITS + SLOT_BITS))
    found = torch.empty_like(proposals).scatter_(2, orders, proposals)
    return torch.minimum(found[:, 0], found[:, 1])


def partners_of(proposals: Tensor) -> Tensor:
    """The slots that proposals name."""
    return (proposals >> _ORIGIN_BITS) & ((1 << SLOT_BITS) - 1)
