"""The nearest heavier neighbour of each prototype by Ward's cost, among those of its block of an order.

The last block of an order reaches back into the one before, so that all are whole. A cost is a float32 that is not
negative, so its bits are ordered as it is. The lowest, as many as the number of a prototype in its block has, are taken
for that; with the slot that it is the cost of going into below them it is one whole number. Knows nothing of what an
order means.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from protokv.memory.protokv.policies.blocked.parts import SLOT_BITS, parts_of
from protokv.memory.protokv.policies.blocked.schedule import is_large
from protokv.memory.protokv.policies.blocked.sketch import Sketch
from protokv.memory.sorting import sorted_from

WIDTH, WIDE = 32, 128
"""Prototypes of a block, at most, in large banks and in small ones."""
# 31 bits of a cost, those of a slot and these are a proposal; the bit above says that it has to wait.
_ORIGIN_BITS = 11
_WAITS = 1 << (31 + SLOT_BITS + _ORIGIN_BITS)


def width_of(prototypes: int) -> int:
    """The block's width for K prototypes."""
    return min(WIDTH if is_large(prototypes) else WIDE, prototypes)


def rows_of(prototypes: int) -> int:
    """Places of the blocks of K prototypes: whole blocks."""
    width = width_of(prototypes)
    return -(-prototypes // width) * width


@dataclass(frozen=True, slots=True)
class BlockTables:
    """Constants of blocks of a width.

    Attributes:
        width: of a block.
        columns: of a block's rows, heaviest first, the number of each column, and above all bits of a cost where that
            is not heavier; `[width, width]` int32.
        starts: of each place of the blocks where its own begins, `[rows]` int64.
        origins: a number for each place of a block in each of two orders, another one in the last, `[2, rows]` int64.
        heads: where the slots of each head begin among those of all, `[heads]` int64.
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
        line = torch.arange(width, dtype=torch.int32)
        columns = torch.where(line < line[:, None], line, line | ~low_bits(width) & 0x7FFFFFFF)
        place = torch.arange(rows)
        # The last block may have some of the one before, with the same partners.
        origins = place % width + (place >= rows - width) * 2 * width + torch.tensor([[0], [width]])
        begin = torch.arange(heads) * prototypes
        tables = (columns, place - place % width, origins, begin)
        return cls(width, *(table.to(device) for table in tables))


def low_bits(width: int) -> int:
    """The bits of a number below the width of a block: the lowest of a cost, which give way to one."""
    return (1 << (width - 1).bit_length()) - 1


def nearest_heavier(
    sketch: Sketch, mass: Tensor, share: Tensor, orders: Tensor, line: Tensor, tables: BlockTables
) -> Tensor:
    """Search all blocks of two orders.

    Args:
        sketch: of n heads.
        mass: `[n, K]` int64. One is heavier than another if it has more mass, or as much and a lower slot.
        share: `[n, K]` float32, 1 / weight; where that is infinite a merge costs nothing.
        orders: `[n, 2, K]` int64, all slots in each.
        line: `[K]` int64, 0, 1, ...
        tables: of K.

    Returns:
        Proposals `[n, K]` int64: the bits of the least cost and the place in the block of what it is the cost of going
        into, below these its slot, and last what makes no two of a head equal. Of all blocks the least.
        Who meets nobody heavier proposes to go into itself, at a cost above all others.
    """
    n, K = mass.shape
    rows, width, device = len(tables.starts), tables.width, mass.device
    low, whole = low_bits(width), rows - width
    # The last block is whole: it reaches back into the one before.
    orders = torch.cat((orders[:, :, :whole], orders[:, :, K - width :]), 2)
    # Each block from heavy to light, and by slot where masses are equal: in one number, which is sorted.
    heavy = torch.sub(line, mass, alpha=1 << SLOT_BITS)[:, None].expand(n, 2, K).gather(2, orders)
    orders = sorted_from(heavy.view(n, 2, -1, width)).view(n, 2, rows).bitwise_and_((1 << SLOT_BITS) - 1)
    flat = (orders + tables.heads[:n, None, None]).view(-1)
    points, norms, share = sketch.points.flatten(0, 1), sketch.norms.view(-1), share.view(-1)
    best = torch.empty(n * 2 * rows, dtype=torch.int32, device=device)
    for part in parts_of(n * 2 * rows, device, width):
        own = flat[part]
        z = points.index_select(0, own).float().view(-1, width, points.shape[1])
        norm, shares = (given.index_select(0, own).view(-1, width) for given in (norms, share))
        cost = (norm[:, :, None] + norm[:, None]).baddbmm_(z, z.transpose(1, 2), alpha=-2)
        cost.div_(shares[:, :, None] + shares[:, None])
        # One comparison tells the least cost and, of equal ones, the heaviest partner.
        numbers = cost.view(torch.int32).bitwise_and_(~low).bitwise_or_(tables.columns)
        torch.amin(numbers, 2, out=best[part].view(-1, width))
    best = best.view(n, 2, rows)
    partner = orders.gather(2, (best & low) + tables.starts)
    named = torch.add(tables.origins, partner, alpha=1 << _ORIGIN_BITS)
    proposals = torch.add(named, best, alpha=1 << (_ORIGIN_BITS + SLOT_BITS))
    return torch.empty_like(mass).scatter_reduce_(
        1, orders.flatten(1), proposals.flatten(1), "amin", include_self=False
    )


def in_turn(proposals: Tensor, filled: int) -> tuple[Tensor, Tensor]:
    """The proposals `[n, filled]` of the first slots, behind all others those that have to wait; and what they go into.

    If the cheaper one of two merges that share a prototype is made, the other one's cost is not what it was. So a
    prototype waits where what it would go into goes itself at a lower cost, or where something comes into it at a lower
    cost. Among those that do not wait nothing goes and is gone into, and there are always some: the cheapest of all.
    """
    proposals = proposals[:, :filled]
    into = (proposals >> _ORIGIN_BITS) & ((1 << SLOT_BITS) - 1)
    cheaper = proposals.gather(1, into).scatter_reduce_(1, into, proposals, "amin")
    # Who proposes to go into itself waits as well: no other proposal is equal to its own.
    return torch.add(proposals, proposals >= cheaper, alpha=_WAITS), into
