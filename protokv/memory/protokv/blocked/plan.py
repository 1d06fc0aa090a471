"""A plan: the merges that a head will make next, all found at once.

Every prototype proposes to go into its nearest neighbour, by the nearer of two orders (`orders`, `nearest`). It may if
that one is heavier, or as heavy and of a lower slot, and does not itself propose so: what is gone into stays. Several
may go into one; each is charged with the mass that went in before it, cheapest first. The cheapest M are the plan.

There are always M: where fewer propose, the head's plan is the M cheapest of the pairs 2 and 1, 4 and 3, ... in the order
of place, of which there are enough as long as 2 M prototypes are alive.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from protokv.memory.protokv.blocked.nearest import NONE, Neighbours, nearest, rows_of
from protokv.memory.protokv.blocked.orders import by_content, by_place
from protokv.memory.protokv.blocked.sketch import FREE, sketch_of

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


def plan_of(points: Points, merges: int, signs: tuple[Tensor, Tensor], power: float) -> tuple[Tensor, Tensor]:
    """The next merges of each head.

    Args:
        points: of which at least `2 * merges` are alive in each head.
        merges: M.
        signs: of `signs_of`.
        power: a prototype of mass m weighs m ** power in a cost.

    Returns:
        Slots that go, and those that they go into, `[n, M]` int64 each, cheapest first. No slot goes twice, or goes and
        is gone into.
    """
    n, K, D = points.key_center.shape
    rows = rows_of(K)
    free = points.mass == 0
    sketch = sketch_of(points.key_center, points.value_center, free, signs, rows)
    mass = torch.nn.functional.pad(points.mass.long(), (0, rows - K))
    share = _weight(mass.clamp(min=1), power).reciprocal_()
    padding = torch.arange(K, rows, device=mass.device).expand(n, -1)
    place = torch.cat((by_place(points.mean, points.last_step, free), padding), 1)
    content = torch.cat((by_content(sketch, free, D), padding), 1)
    standing, moved = (nearest(sketch, share, order, D) for order in (place, content))
    is_moved = moved.bits < standing.bits
    bits = torch.where(is_moved, moved.bits, standing.bits)
    partner = torch.where(is_moved, moved.partner, standing.partner)
    gone, into, enough = _cheapest_proposals(bits, partner, mass, merges, power)
    gone_before, into_before = _cheapest_pairs(standing, place, merges)
    return torch.where(enough, gone, gone_before), torch.where(enough, into, into_before)


def _cheapest_proposals(
    bits: Tensor, partner: Tensor, mass: Tensor, merges: int, power: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The cheapest proposals, and whether there are enough, `[n, 1]`."""
    slot = torch.arange(mass.shape[1], device=mass.device)
    other = mass.gather(1, partner)
    proposes = ((other > mass) | ((other == mass) & (partner < slot))) & (bits < _REAL)
    accepted = proposes & ~proposes.gather(1, partner)
    bits = torch.where(accepted, bits, NONE)
    count = min(_CHARGED * merges, bits.shape[1])
    gone = _least(bits, count)
    into = partner.gather(1, gone)
    # Those of one target stand together, cheapest first.
    together = into.argsort(dim=1, stable=True)
    gone, into = gone.gather(1, together), into.gather(1, together)
    bits = bits.gather(1, gone)
    real = bits != NONE
    own, target = mass.gather(1, gone), mass.gather(1, into)
    joined = own * real
    before = joined.cumsum(1) - joined
    is_first = torch.nn.functional.pad(into[:, 1:] != into[:, :-1], (1, 0), value=True)
    grown = target + before - (before * is_first).cummax(1).values
    weight, first, later = (_weight(part, power) for part in (own, target, grown))
    cost = bits.view(torch.float32) * (weight.reciprocal() + first.reciprocal_())
    cost /= weight.reciprocal_() + later.reciprocal_()
    charged = torch.where(real, cost.view(torch.int32), NONE)
    chosen = _least(charged, merges)
    return gone.gather(1, chosen), into.gather(1, chosen), real.sum(1, keepdim=True) >= merges


def _cheapest_pairs(standing: Neighbours, place: Tensor, merges: int) -> tuple[Tensor, Tensor]:
    chosen = _least(standing.before, merges)
    return place.gather(1, 2 * chosen + 1), place.gather(1, 2 * chosen)


def _least(bits: Tensor, count: int) -> Tensor:
    """Where the least of `[n, m]` int32 are, ascending, `[n, count]` int64; of equal ones the first."""
    index = torch.arange(bits.shape[1], device=bits.device)
    # No two keys are equal, so it is well defined which are the least.
    return ((bits.long() << 32) | index).topk(count, dim=1, largest=False).values & _LOW


def _weight(mass: Tensor, power: float) -> Tensor:
    weight = mass.float()
    return weight if power == 1.0 else weight.pow_(power)
