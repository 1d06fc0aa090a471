"""The literal agglomerative bank: one head and one merge at a time, every cost from the members themselves.

Where a head sees new tokens mostly, no pair with one of the newest points, or of the first steps, merges unless one
repeats the other when the step begins. A pair of clusters is barred if any pair of their members is. A token that the
step before had in the same place does not enter, and that one counts four times. The near window and the
context are those of `naive`; it shares no code with the fast bank.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from protokv.core.rotary import Rotary
from protokv.core.step import StepKV
from protokv.core.tensors import MemoryShape
from tests.oracles.paper import Head, NaiveProtoKV, Prototype, Token
from tests.oracles.quantized import round_center

# Repeats that count as seen when a stream begins.
AT_FIRST = 128


class NaiveAgglomerative(NaiveProtoKV):
    """`NaiveProtoKV` with another bank: new tokens follow the slots until the step is merged."""

    def __init__(self, config: Any, shape: MemoryShape, rotary: Rotary) -> None:
        super().__init__(config, shape, rotary)
        heads = shape.layers * shape.kv_heads
        # Of each head: tokens that were compared with the next step, and those of them that came again.
        self.seen, self.repeated = [0] * heads, [0] * heads
        self.barred = 0
        # What tokens weigh in the bank, by id: nothing if one repeats another, and 4 if it is repeated.
        self.weight: dict[int, int] = {}
        self.again = 0

    def _split(self, step: StepKV) -> list[list[Token]]:
        """Split a step, and compare the last one, as far as it is in the near window, with it."""
        tokens = super()._split(step)
        if self.near:
            for number, bank in enumerate(bank for layer in self.heads for bank in layer):
                new = torch.stack([everywhere[number].value for everywhere in tokens]).double()
                near = float(new.square().sum(1).mean()) * 0.8
                for everywhere in self.near[-1][1]:
                    square = float((everywhere[number].value.double() - new).square().sum(1).min())
                    self.seen[number] += 1
                    self.repeated[number] += square <= near
                    bank.decisions.append((-1, abs(square - near) / max(near, 1e-30)))
        self._look_back(tokens)
        return tokens

    def _look_back(self, tokens: list[list[Token]]) -> None:
        """Weigh the tokens of a step, and those of the step before that it repeats, counted from their ends."""
        before = [everywhere for _, held in self.near[-1:] for everywhere in held]
        for place, everywhere in enumerate(reversed(tokens), 1):
            again = place <= len(before) and self._is_same(everywhere, before[-place])
            self.weight |= dict.fromkeys(map(id, everywhere), 0 if again else 1)
            if again and self.weight[id(before[-place][0])]:
                self.weight |= dict.fromkeys(map(id, before[-place]), 4)

    def _is_same(self, one: list[Token], other: list[Token]) -> bool:
        pairs = [(one[head].value.double(), other[head].value.double()) for head in range(self.shape.kv_heads)]
        square = sum(float((new - old).square().sum()) for new, old in pairs)
        norm = sum(float(new.square().sum()) for new, _ in pairs)
        return square <= 2.0**-24 * norm and torch.equal(one[0].coordinates, other[0].coordinates)

    def _absorb(self, bank: Head, token: Token, now: int) -> None:
        weight = self.weight[id(token)]
        if not weight:
            self.again += 1
            return
        bank.slots.append(None)
        self._initialize(bank, len(bank.slots) - 1, token, now)
        added = bank.slots[-1]
        assert added is not None
        added.mass = weight

    def _maintain(self, now: int) -> None:
        for number, bank in enumerate(bank for layer in self.heads for bank in layer):
            self._merge_step(bank, number, now)

    def _merge_step(self, bank: Head, number: int, now: int) -> None:
        K = self.config.prototypes
        points = list(bank.slots)
        clusters = [[index] for index, point in enumerate(points) if point is not None]
        barred = self._barred(bank, number, now) if len(clusters) > K else set()
        self.barred += len(barred)
        while len(clusters) > K:
            between = self._costs_between([_members(points, cluster) for cluster in clusters])
            costs = sorted(
                (between[i][j], min(clusters[i]), min(clusters[j]), clusters[i], clusters[j])
                for i, j in itertools.combinations(range(len(clusters)), 2)
                if barred.isdisjoint(itertools.product(clusters[i], clusters[j]))
            )
            cost, _, _, one, other = costs[0]
            # A decision is clear if every other merge costs more.
            margin = min((item[0] - cost for item in costs[1:2]), default=1.0) / max(cost, 1e-30)
            bank.decisions.append((min(one), margin))
            clusters = [cluster for cluster in clusters if cluster not in (one, other)]
            clusters.append(sorted(one + other))

        slots: list[Prototype | None] = [None] * K
        held, new = [c for c in clusters if c[0] < K], [c for c in clusters if c[0] >= K]
        at_mean = bool(self._share(number) > 0)
        for cluster in held:
            slots[cluster[0]] = self._joined(_members(points, cluster), at_mean)
        for cluster in sorted(new):
            slots[slots.index(None)] = self._joined(_members(points, cluster), at_mean)
        if self.config.is_quantized:
            for prototype in slots:
                if prototype is not None:
                    centers = round_center(prototype.key_center, prototype.value_center, prototype.mass)
                    prototype.key_center, prototype.value_center = centers
        bank.slots, bank.used = slots, {slot for slot in bank.used if slot < K}
        bank.used |= {slot for slot in range(K) if slots[slot] is not None}

    def _barred(self, bank: Head, number: int, now: int) -> set[tuple[int, int]]:
        """Return the pairs of points, both ways round, that may not merge in this step."""
        K, config = self.config.prototypes, self.config
        alive = {index: point for index, point in enumerate(bank.slots) if point is not None}
        tokens = [index for index in alive if index >= K]
        T = len(tokens)
        features = torch.stack([_feature(alive[index]) for index in tokens])
        repeat = sorted((features - features.mean(0)).square().sum(1).tolist())[(T - 1) // 2] / 4
        between = self._costs_between([[point] for point in alive.values()])
        costs = {(i, j): between[m][n] for (m, i), (n, j) in itertools.permutations(enumerate(alive), 2)}
        present = max(config.budget / 2, (now + 1) * T / 8) - config.near_tokens
        present = max(0.0, min(present, K - 2))
        room, share = min(K / 2, max(0, K - 2) - present), self._share(number)
        count, first = int(share * present), int(share * room)
        if config.budget <= T:
            count, first = max(0, K - 2), 0
        steps = [point.last_step if point else -1 for point in bank.slots]
        by_age = sorted(range(K + T), key=lambda index: (steps[index], index))
        kept = {*by_age[K + T - count :], *first_of(steps[:K], first)}
        found = {pair for pair, cost in costs.items() if not kept.isdisjoint(pair) and cost >= repeat}
        # What is compared with `repeat` must be clear as well. Alone, a token repeats nothing.
        compared = [cost for pair, cost in costs.items() if not kept.isdisjoint(pair)] if T > 1 else []
        bank.decisions += [(-1, abs(cost - repeat) / max(repeat, 1e-30)) for cost in compared]
        return found

    def _share(self, number: int) -> Tensor:
        """Return 0 for a head of which up to 2 in 10 tokens are new, 1 from 3 on; in float32."""
        new, seen = self.seen[number] - self.repeated[number], self.seen[number] + AT_FIRST
        return ((torch.tensor(new) / seen - 0.2) / (0.3 - 0.2)).clamp(0, 1)

    def _costs_between(self, clusters: Sequence[Sequence[Prototype]]) -> list[list[float]]:
        """Return w v / (w + v) times the squared distance of the centres; w is the mass to the given power."""
        centers, weights = [], []
        for cluster in clusters:
            shares = [member.mass**self.config.merge_mass_power for member in cluster]
            features = [_feature(member) for member in cluster]
            pairs = zip(shares, features, strict=True)
            centers.append(torch.stack([share * feature for share, feature in pairs]).sum(0) / sum(shares))
            weights.append(float(sum(shares)))
        w, c = torch.tensor(weights, dtype=torch.float64), torch.stack(centers)
        distances = (c[:, None] - c[None, :]).square().sum(2)
        costs: list[list[float]] = (w[:, None] * w / (w[:, None] + w) * distances).tolist()
        return costs

    def _joined(self, members: list[Prototype], at_mean: bool) -> Prototype:
        """Return one prototype of many. Its position is the newest, or the mean; of equal ones the first member's."""
        if len(members) == 1:
            return members[0]
        mass = sum(member.mass for member in members)

        def mean(parts: Sequence[Tensor]) -> Tensor:
            pairs = zip(members, parts, strict=True)
            return sum((member.mass * part.double() for member, part in pairs), torch.zeros(())) / mass

        middle = mean([member.mean for member in members])
        offsets = [member.mean.double() - middle for member in members]
        pairs = zip(members, offsets, strict=True)
        spread = mean([member.covariance.double() + torch.outer(offset, offset) for member, offset in pairs])
        times = [float(member.position[0]) for member in members]
        position = members[times.index(max(times))].position
        if at_mean:
            position = mean([member.position for member in members])
        joined = Prototype(
            key_center=mean([member.key_center for member in members]).float(),
            value_center=mean([member.value_center for member in members]).float(),
            mass=mass,
            mean=middle.float(),
            covariance=spread.float(),
            position=position,
            last_step=max(member.last_step for member in members),
            key_counts=torch.stack([member.key_counts for member in members]).sum(0),
            value_counts=torch.stack([member.value_counts for member in members]).sum(0),
            updates=sum(member.updates for member in members),
        )
        for member in members:
            member.merged_into = joined
        return joined


def first_of(steps: Sequence[int], most: int) -> list[int]:
    """Return the indices of the points of the first steps: of as many whole steps as have up to `most` points in all.

    A step of -1 is none.
    """
    return [index for index, step in enumerate(steps) if step >= 0 and sum(0 <= one <= step for one in steps) <= most]


def _feature(point: Prototype) -> Tensor:
    return torch.cat((point.key_center, point.value_center)).double()


def _members(points: Sequence[Prototype | None], cluster: Sequence[int]) -> list[Prototype]:
    return [point for point in (points[index] for index in cluster) if point is not None]
