"""The literal agglomerative bank: one head and one merge at a time, every cost from the members themselves.

The near window, the residual statistics and the context are those of `naive`; it shares no code with the fast bank.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from protokv.core.naive import Head, NaiveProtoKV, Prototype, Token
from tests.oracles.quantized import round_center


class NaiveAgglomerative(NaiveProtoKV):
    """`NaiveProtoKV` with another bank: new tokens follow the slots until the step is merged."""

    def _absorb(self, bank: Head, token: Token, now: int) -> None:
        bank.slots.append(None)
        self._initialize(bank, len(bank.slots) - 1, token, now)

    def _maintain(self, now: int) -> None:
        for bank in (bank for layer in self.heads for bank in layer):
            self._merge(bank)

    def _merge(self, bank: Head) -> None:
        K = self.config.prototypes
        points = list(bank.slots)
        clusters = [[index] for index, point in enumerate(points) if point is not None]
        while len(clusters) > K:
            between = self._costs_between([_members(points, cluster) for cluster in clusters])
            costs = sorted(
                (between[i][j], min(clusters[i]), min(clusters[j]), clusters[i], clusters[j])
                for i, j in itertools.combinations(range(len(clusters)), 2)
            )
            cost, _, _, one, other = costs[0]
            # A decision is clear if every other merge costs more.
            margin = min((item[0] - cost for item in costs[1:2]), default=1.0) / max(cost, 1e-30)
            bank.decisions.append((min(one), margin))
            clusters = [cluster for cluster in clusters if cluster not in (one, other)]
            clusters.append(sorted(one + other))

        slots: list[Prototype | None] = [None] * K
        held, new = [c for c in clusters if c[0] < K], [c for c in clusters if c[0] >= K]
        for cluster in held:
            slots[cluster[0]] = self._joined(_members(points, cluster))
        for cluster in sorted(new):
            slots[slots.index(None)] = self._joined(_members(points, cluster))
        if self.config.is_quantized:
            for prototype in slots:
                if prototype is not None:
                    centers = round_center(prototype.key_center, prototype.value_center, prototype.mass)
                    prototype.key_center, prototype.value_center = centers
        bank.slots, bank.used = slots, {slot for slot in bank.used if slot < K}
        bank.used |= {slot for slot in range(K) if slots[slot] is not None}
        if self.config.residual:
            self._count_shared(bank, points[K:])

    def _costs_between(self, clusters: Sequence[Sequence[Prototype]]) -> list[list[float]]:
        """Return w v / (w + v) times the squared distance of the centres; w is the mass to the given power."""
        centers, weights = [], []
        for cluster in clusters:
            shares = [member.mass**self.config.merge_mass_power for member in cluster]
            features = [torch.cat((member.key_center, member.value_center)).double() for member in cluster]
            pairs = zip(shares, features, strict=True)
            centers.append(torch.stack([share * feature for share, feature in pairs]).sum(0) / sum(shares))
            weights.append(float(sum(shares)))
        w, c = torch.tensor(weights, dtype=torch.float64), torch.stack(centers)
        distances = (c[:, None] - c[None, :]).square().sum(2)
        costs: list[list[float]] = (w[:, None] * w / (w[:, None] + w) * distances).tolist()
        return costs

    def _joined(self, members: list[Prototype]) -> Prototype:
        """Return one prototype of many. Its position is the newest or the first; of equal ones the first member's."""
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
        chosen = times.index(max(times) if self.config.anchor == "recent" else min(times))
        position = members[chosen].position
        if self.config.anchor == "average":
            position = mean([member.position for member in members])
        joint = [member.joint_counts for member in members if member.joint_counts is not None]
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
            joint_counts=torch.stack(joint).sum(0) if joint else None,
            updates=sum(member.updates for member in members),
        )
        for member in members:
            member.merged_into = joined
        return joined

    def _count_shared(self, bank: Head, tokens: Sequence[Prototype | None]) -> None:
        """Count the residuals of tokens that share a prototype, against its centre after the step."""
        for token in tokens:
            if token is not None and token.merged_into is not None:
                owner = token.merged_into
                keys, values = token.key_center - owner.key_center, token.value_center - owner.value_center
                self._count(bank, owner, keys, values)


def _members(points: Sequence[Prototype | None], cluster: Sequence[int]) -> list[Prototype]:
    return [point for point in (points[index] for index in cluster) if point is not None]
