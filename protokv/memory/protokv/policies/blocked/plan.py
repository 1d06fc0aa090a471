"""A plan: the merges that a head will make next, all found at once.

Every prototype proposes to go into its nearest heavier neighbour, by the nearer of two orders (`orders`, `nearest`).
Several may go into one; each is charged with the mass that went in before it, cheapest first. The cheapest M are the
plan: nearly all propose, so there are always so many. Where one goes into another that goes itself, both go into what
is at the end of the line: what is gone into stays.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from protokv.memory.protokv.policies.blocked.nearest import NONE, nearest_heavier, rows_of
from protokv.memory.protokv.policies.blocked.orders import by_content, by_place, cells_of
from protokv.memory.protokv.policies.blocked.sketch import FREE, signs_of, size_of, sketch_of

# A cost above this is that of a slot which holds nothing.
_REAL = int(torch.tensor(FREE / 1e6).view(torch.int32))
# How many times M of the cheapest proposals are charged.
_CHARGED = 3
_LOW = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Points:
    """The prototypes of some heads.

    Attributes:
        key_center, value_center: `[n, K, D]` float32.
        mass: `[n, K]`, whole numbers; 0 is a free slot.
        mean: `[n, K, 2]` float32, coordinates.
        last_step: `[n, K]` int64.
    """

    key_center: Tensor
    value_center: Tensor
    mass: Tensor
    mean: Tensor
    last_step: Tensor


@dataclass(frozen=True, slots=True)
class Tables:
    """Constants of a head size: `signs_of` and `cells_of`."""

    signs: tuple[Tensor, Tensor]
    cells: Tensor

    @classmethod
    def of(cls, size: int, device: torch.device) -> Tables:
        """The tables of heads of `size`."""
        return cls(signs_of(size, device), cells_of(device))


def plan_of(points: Points, merges: int, tables: Tables, power: float) -> tuple[Tensor, Tensor]:
    """The next merges of each head.

    Args:
        points: of which at least `2 * merges` are alive in each head.
        merges: M.
        tables: of the head size.
        power: a prototype of mass m weighs m ** power in a cost.

    Returns:
        Slots that go, and those that they go into, `[n, M]` int64 each, cheapest first. No slot goes twice, or goes and
        is gone into.
    """
    n, K, D = points.key_center.shape
    F = size_of(D)
    rows = rows_of(K)
    free = points.mass == 0
    sketch = sketch_of(points.key_center, points.value_center, free, tables.signs, rows)
    mass = torch.nn.functional.pad(points.mass.long(), (0, rows - K))
    share = _weight(mass.clamp(min=1), power).reciprocal_()
    orders = torch.stack((by_place(points.mean, points.last_step, free, tables.cells), by_content(sketch, free, F)), 1)
    padding = torch.arange(K, rows, device=mass.device).expand(n, 2, -1)
    bits, partner = nearest_heavier(sketch, mass, share, torch.cat((orders, padding), 2), F)
    gone, into = _cheapest_proposals(bits, partner, mass, merges, power)
    return gone, _ends_of_lines(gone, into, rows)


def _cheapest_proposals(
    bits: Tensor, partner: Tensor, mass: Tensor, merges: int, power: float
) -> tuple[Tensor, Tensor]:
    bits = torch.where(bits < _REAL, bits, NONE)
    gone = _least(bits, min(_CHARGED * merges, bits.shape[1]))
    into = partner.gather(1, gone)
    # Those of one target stand together, cheapest first.
    together = into.argsort(dim=1, stable=True)
    gone, into = gone.gather(1, together), into.gather(1, together)
    bits = bits.gather(1, gone)
    own, target = mass.gather(1, gone), mass.gather(1, into)
    joined = own * (bits != NONE)
    before = joined.cumsum(1) - joined
    is_first = torch.nn.functional.pad(into[:, 1:] != into[:, :-1], (1, 0), value=True)
    grown = target + before - (before * is_first).cummax(1).values
    weight, first, later = (_weight(part, power) for part in (own, target, grown))
    cost = bits.view(torch.float32) * (weight.reciprocal() + first.reciprocal_())
    cost /= weight.reciprocal_() + later.reciprocal_()
    chosen = _least(torch.where(bits != NONE, cost.view(torch.int32), NONE), merges)
    return gone.gather(1, chosen), into.gather(1, chosen)


def _ends_of_lines(gone: Tensor, into: Tensor, rows: int) -> Tensor:
    """Where each goes in the end; a line leads from light to heavy, so it has one."""
    slot = torch.arange(rows, device=gone.device).expand(len(gone), -1)
    goes = slot.scatter(1, gone, into)
    for _ in range(gone.shape[1].bit_length()):
        goes = goes.gather(1, goes)
    return goes.gather(1, gone)


def _least(bits: Tensor, count: int) -> Tensor:
    """Where the least of `[n, m]` int32 are, ascending, `[n, count]` int64; of equal ones the first."""
    index = torch.arange(bits.shape[1], device=bits.device)
    # No two keys are equal, so it is well defined which are the least.
    return ((bits.long() << 32) | index).topk(count, dim=1, largest=False).values & _LOW


def _weight(mass: Tensor, power: float) -> Tensor:
    weight = mass.float()
    return weight if power == 1.0 else weight.pow_(power)
