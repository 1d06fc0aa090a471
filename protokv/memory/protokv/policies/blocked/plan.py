"""A plan: the merges that a head will make next, all found at once.

Every prototype proposes to go into its nearest heavier neighbour, by the nearer of two orders (`orders`, `nearest`).
The cheapest M are the plan, first of all those whose turn it is (`in_turn`): merges that touch each other only in
what they go into. Nearly all propose, so there are always so many. A slot that is free weighs nothing, so it goes
first. Several may go into one; what it weighs by then is not charged to the later ones, which was measured to make no
difference. Where too few have their turn, and one goes into another that goes itself, both go into what is at the end
of the line: what is gone into stays.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from protokv.memory.protokv.policies.blocked.nearest import BlockTables, in_turn, nearest_heavier
from protokv.memory.protokv.policies.blocked.orders import OrderTables, orders_of
from protokv.memory.protokv.policies.blocked.sketch import SketchTables, sketch_of


@dataclass(frozen=True, slots=True)
class Points:
    """The prototypes of some heads.

    Attributes:
        folded: centres, `[n, K, F]` float32 (`fold`).
        mass: `[n, K]` int64; 0 is a free slot, all of whose numbers are 0.
        mean: `[n, K, 2]` float32, coordinates.
        last_step: `[n, K]` int64.
    """

    folded: Tensor
    mass: Tensor
    mean: Tensor
    last_step: Tensor


@dataclass(frozen=True, slots=True)
class Tables:
    """Constants of a head size and a number of prototypes, and the numbers of all slots."""

    sketch: SketchTables
    blocks: BlockTables
    orders: OrderTables
    line: Tensor

    @classmethod
    def of(cls, size: int, prototypes: int, heads: int, device: torch.device) -> Tables:
        """The tables of so many heads of `size`, K prototypes each."""
        return cls(
            SketchTables.of(size, device),
            BlockTables.of(prototypes, heads, device),
            OrderTables.of(device),
            torch.arange(prototypes, device=device),
        )


def plan_of(points: Points, filled: int, merges: int, tables: Tables, power: float) -> tuple[Tensor, Tensor]:
    """The next merges of each head.

    Args:
        points: K in each head.
        filled: how many of them take part, the first ones; at least `2 * merges`.
        merges: M.
        tables: of at least so many heads of their size and of K.
        power: a prototype of mass m weighs m ** power in a cost.

    Returns:
        Slots that go, and those that they go into, `[n, M]` int64 each, cheapest first. No slot goes twice, or goes and
        is gone into.
    """
    sketch = sketch_of(points.folded)
    orders = orders_of(sketch, points.mean, points.last_step, tables.line, tables.orders)
    share = _share(points.mass, power)
    proposals = nearest_heavier(sketch, points.mass, share, orders, tables.line, tables.blocks)
    turns, into = in_turn(proposals, filled)
    gone = turns.topk(merges, dim=1, largest=False).indices
    return gone, _ends_of_lines(gone, into.gather(1, gone), tables.line)


def _ends_of_lines(gone: Tensor, into: Tensor, line: Tensor) -> Tensor:
    """Where each goes in the end; a line leads from light to heavy, so it has one."""
    goes = line.expand(len(gone), -1).scatter(1, gone, into)
    for _ in range(gone.shape[1].bit_length()):
        goes = goes.gather(1, goes)
    return goes.gather(1, gone)


def _share(mass: Tensor, power: float) -> Tensor:
    """1 / weight; what is free weighs nothing, even to the power of 0."""
    return mass.reciprocal() if power == 1.0 else mass.float().pow(power).mul_(mass > 0).reciprocal_()
