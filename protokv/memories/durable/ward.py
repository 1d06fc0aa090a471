"""Ward's linkage: the cheapest merges of a few points whose costs are all known, for many sets of points at once.

The cost of merging clusters of masses n and m is n m / (n + m) times the squared distance of their centres (Ward,
1963). Knows nothing of prototypes. Two properties are used here and by `agglomerative`. A merge changes the costs of
others by the recurrence of Lance and Williams (1967), so centres are not needed again. And Ward's linkage is
reducible: a merged cluster is never nearer to a third one than the nearer of its parts was.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Two points are the same if their squared distance is below this share of their squared norms: float64 rounding.
_SAME = 1e-13
# Costs that are worked out at once; more are done in turn.
_BLOCK_ELEMENTS = 2**19
_ROWS = 256


@dataclass(frozen=True, slots=True)
class Merged:
    """The result of `merge_cheapest` for `n` points in each of `B` sets.

    Attributes:
        root: `[B, n]` int64, the point that each point is part of now, the lowest one of its cluster.
        height: `[B]` float32, the cost of the last merge; -inf where none was made.
        nearest: `[B, n]` float32, of each root the least cost of merging it with another one; inf of the others.
    """

    root: Tensor
    height: Tensor
    nearest: Tensor


def costs_between(points: Tensor, mass: Tensor) -> Tensor:
    """Return Ward's cost of all pairs of `points` `[B, n, F]` of `mass` `[B, n]`: `[B, n, n]` float32, inf on the
    diagonal.

    A point of mass 0 is absent: it costs inf. The products are taken in float64 and rounded once, because the expanded
    square cancels, and so that a cost does not depend on the other points.
    """
    B, n, _ = points.shape
    costs = torch.empty(B, n, n, device=points.device)
    free = mass == 0
    share = mass.reciprocal().masked_fill_(free, 1.0)
    sets = max(1, _BLOCK_ELEMENTS // (n * min(n, _ROWS)))
    for start in range(0, B, sets):
        s = slice(start, start + sets)
        some = points[s].double()
        some -= some[:, :1].clone()
        norms = some.square().sum(2)
        for first in range(0, n, _ROWS):
            # The other half of the pairs is the same.
            stop = min(first + _ROWS, n)
            r, before, upto = slice(first, stop), slice(0, first), slice(0, stop)
            bound = norms[:, r, None] + norms[:, None, upto]
            squares = torch.baddbmm(bound, some[:, r], some[:, upto].transpose(1, 2), alpha=-2)
            squares.masked_fill_(squares <= bound.mul_(_SAME), 0.0)
            cost = squares.float()
            cost /= share[s, r, None] + share[s, None, upto]
            cost.masked_fill_(free[s, r, None], torch.inf).masked_fill_(free[s, None, upto], torch.inf)
            costs[s, r, before], costs[s, before, r] = cost[:, :, before], cost[:, :, before].transpose(1, 2)
            # Even within one product the two may round differently.
            costs[s, r, r] = torch.minimum(cost[:, :, r], cost[:, :, r].transpose(1, 2))
    costs.diagonal(dim1=1, dim2=2).fill_(torch.inf)
    return costs


def merge_cheapest(cost: Tensor, mass: Tensor, merges: Tensor) -> Merged:
    """Merge the cheapest pair, `merges` `[B]` times in each set; of equal pairs the one of the lowest points.

    One merge after the other, all sets side by side: with all costs at hand each takes a handful of operations on
    `[B, n]`. Needs more than `merges` points of mass above 0 in each set.

    Args:
        cost: of `costs_between`; overwritten.
        mass: `[B, n]`.
        merges: `[B]` int64.
    """
    B, n, _ = cost.shape
    device = cost.device
    mass = mass.clone()
    parent = torch.arange(n, device=device).repeat(B, 1)
    height = torch.full((B,), -torch.inf, device=device)
    nearest, neighbour = cost.min(2)
    rounds, fewest = int(merges.max()), int(merges.min())
    s = torch.arange(B, device=device)
    for done in range(rounds):
        if done >= fewest:
            s = (merges > done).nonzero().squeeze(1)
        whole = len(s) == B
        masses, near, other = (part if whole else part[s] for part in (mass, nearest, neighbour))
        here = torch.arange(len(s), device=device)
        lowest, a = near.min(1)
        b = other[here, a]
        ends = torch.stack((a, b), 1)
        height[s] = lowest
        # The recurrence of Lance and Williams, and at least the cost of the nearer part: in spite of rounding, a merge
        # gives no point a nearer neighbour.
        rows, total = cost[s[:, None], ends], masses.gather(1, ends)
        scaled = (rows * (total[:, :, None] + masses[:, None])).sum(1) - masses * lowest[:, None]
        row = torch.maximum(scaled / (masses + total.sum(1, keepdim=True)), rows.amin(1))
        row.scatter_(1, ends, torch.inf)
        cost[s, a], cost[s, :, a] = row, row
        cost[s, :, b] = torch.inf
        # A point gets another nearest neighbour only if its nearest was one of the two.
        lost = (other == a[:, None]) | (other == b[:, None])
        lost.scatter_(1, ends, torch.tensor([[True, False]], device=device).expand(len(s), 2))
        mass[s, a] = total.sum(1)
        parent[s, b] = a
        nearest[s, b], neighbour[s, b] = torch.inf, -1
        which, point = lost.nonzero(as_tuple=True)
        which = s[which]
        nearest[which, point], neighbour[which, point] = cost[which, point].min(1)
    return Merged(_roots(parent), height, nearest)


def _roots(parent: Tensor) -> Tensor:
    """Return the last parent of each point; parents are lower than their children, so doubling the steps ends."""
    while True:
        further = parent.gather(1, parent)
        if torch.equal(further, parent):
            return parent
        parent = further
