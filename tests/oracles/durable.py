"""The rule of `durable` written out for one head: loops over points; numpy only rounds costs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

# As in the rule: of what is kept, of what has no mass, of what may not be.
KEPT = 8e36
FAR = 4e37
NEVER = 1e38
DEARER = 10
CLOSE = 1e-4
"""Costs that differ by less, as a share, may be in another order in float32."""


@dataclass
class Point:
    """A prototype or a token. `center` is [key; value]."""

    center: list[float]
    mass: int
    last: int
    position: list[int]
    kept: bool = False
    sketch: list[float] = field(default_factory=list)


def fold(center: Sequence[float], signs: Sequence[float], most: int = 64) -> list[float]:
    """Return a sketch: numbers with signs, halved in number and added up until there are at most
    64.
    """
    size = len(center)
    while size > most and size % 2 == 0:
        size //= 2
    found = [0.0] * size
    for index, number in enumerate(center):
        found[index % size] += signs[index] * number
    return found


def cost(one: Point, other: Point, deep: bool) -> float:
    """Return Ward's cost of a merge, in a shallow model of points that count as one token each;
    below all others where one has no mass.
    """
    squares = [sum(z * z for z in point.sketch) if point.mass else -FAR for point in (one, other)]
    product = sum(a * b for a, b in zip(one.sketch, other.sketch, strict=True))
    w, v = (max(point.mass, 1) if deep else 1 for point in (one, other))
    return (squares[0] + squares[1] - 2 * product) / (1 / w + 1 / v)


def usual_cost(tokens: Sequence[Point]) -> float:
    """Return the mean squared distance of the tokens of a step from their mean."""
    mean = np.mean([token.sketch for token in tokens], axis=0)
    return float(
        np.mean(
            [sum((z - m) ** 2 for z, m in zip(token.sketch, mean, strict=True)) for token in tokens]
        )
    )


class Step:
    """Merges points so that `goers` of them go; in a deep model strangers go into nothing.

    Attributes:
        groups: the members of each point that stays, itself among them, in the order of the points.
        ambiguous: whether a choice depends on the rounding of a cost.
    """

    def __init__(self, points: list[Point], goers: int, deep: bool) -> None:
        self.points = points
        self.ambiguous = False
        n = len(points)
        most = usual_cost(points[n - goers :]) if deep else math.inf
        self.costs = [
            [cost(one, other, deep) if other is not one else NEVER for other in points]
            for one in points
        ]
        self.gone: set[int] = set()
        self._round(goers, last=False)
        self._round(goers - len(self.gone), last=True)
        self.groups: dict[int, list[int]] = {
            index: [index] for index in range(n) if index not in self.gone
        }
        for index in sorted(self.gone):
            least, goal = self._goal(index)
            self._compare(least, most)
            if least <= most:
                self.groups[goal].append(index)

    def _heavier(self, index: int, other: int) -> bool:
        """Tell whether a point may go into another one; of equal ones into the earlier. What is
        kept is lighter.
        """
        weights = [(not self.points[one].kept, self.points[one].mass) for one in (index, other)]
        weights = [(free and mass > 0, mass) for free, mass in weights]
        return weights[1] > weights[0] or (weights[1] == weights[0] and other < index)

    def _goal(self, index: int) -> tuple[float, int]:
        """Return the least cost of a point and the nearest heavier one that has not gone."""
        found = []
        for other in range(len(self.points)):
            if other in self.gone or not self._heavier(index, other):
                found.append((NEVER, other))
            elif self.points[index].kept:
                found.append((KEPT, other))
            else:
                found.append((self.costs[index][other], other))
        least, *rest = sorted(found)
        if rest and not self.points[index].kept and least[0] < NEVER:
            self._compare(least[0], rest[0][0])
        return least

    def _compare(self, one: float, other: float) -> None:
        # Exactly equal ones tie in any precision, if they are of points without mass.
        if min(one, other) < -FAR / 8 or max(one, other) == math.inf:
            return
        self.ambiguous |= abs(one - other) <= CLOSE * max(abs(one), abs(other), 1.0)

    def _round(self, due: int, last: bool) -> None:
        """Let the cheapest points go; one that waits only in the last round, and dearer."""
        stay = [index for index in range(len(self.points)) if index not in self.gone]
        goals = {index: self._goal(index) for index in stay}
        ranked = []
        for index, (own, goal) in goals.items():
            # What nothing is left for has no goal.
            cheaper = goals.get(goal, (own, goal))[0]
            self._compare(own, cheaper if cheaper < KEPT else math.inf)
            waits = own > cheaper
            ranked.append((own * (DEARER if waits and last else 1), index, waits))
        ranked.sort()
        if 0 < due < len(ranked) and ranked[due][0] < KEPT:
            self._compare(float(ranked[due - 1][0]), float(ranked[due][0]))
        self.gone |= {index for _, index, waits in ranked[:due] if last or not waits}


def cluster(points: Sequence[Point], members: Sequence[int], at_mean: bool) -> Point:
    """Return what members become: their mean, at the place of the newest one or at the mean
    place.
    """
    some = [points[index] for index in sorted(members)]
    mass = sum(point.mass for point in some)

    def mean(name: str) -> list[float]:
        columns = zip(*(getattr(point, name) for point in some), strict=True)
        masses = [point.mass for point in some]
        return [
            sum(m * x for m, x in zip(masses, column, strict=True)) / max(mass, 1)
            for column in columns
        ]

    last = max(point.last for point in some)
    newest = [point.position for point in some if point.last == last][-1]
    return Point(
        mean("center"), mass, last, [round(x) for x in mean("position")] if at_mean else newest
    )


def weigh(weights: Sequence[int], opened: int, absorbed: int) -> list[int]:
    """Return what tokens of these weights weigh in a bank that so many tokens and repeats reached
    before.
    """
    # As if a step of tokens of four sights each had come first.
    new = opened + len(weights)
    repeats = absorbed + 3 * len(weights)
    return [min(weight, 4 if repeats > 1.5 * new else 2) for weight in weights]


@dataclass
class Protection:
    """Which points a head keeps from merging while others are left.

    Attributes:
        prototypes, near, budget: K, W, and the budget of pictures.
        seen, repeated: tokens compared with the next step, and of these, those that came again.
        opened: tokens with a mass that came before.
    """

    prototypes: int
    near: int
    budget: int
    seen: int
    repeated: int
    opened: int

    def share(self) -> float:
        """Return which part of the present is kept."""
        new = (self.seen - self.repeated) / (self.seen + 128)
        return min(1.0, max(0.0, (new - 0.2) / 0.1))

    def keeps(self, last: int, step: int, tokens: int) -> bool:
        """Tell whether a point of step `last` is kept while a step of `tokens` enters the bank."""
        if tokens >= self.budget:
            return last > step - max(1, self.prototypes // tokens)
        most = max(0, self.prototypes - tokens)
        present = min(max(0.0, max(self.budget / 2, (step + 1) * tokens / 8) - self.near), most)
        first = min(self.prototypes / 2, most - present)
        begin = self.near // tokens
        # Steps are counted in tokens that have a mass; in this order, as a bound may be a whole
        # number.
        pace = self.share() / (self.opened + tokens)
        steps = step - begin + 2
        return 0 <= last <= begin - 1 + pace * (first * steps) or last > step - pace * (
            present * steps
        )
