"""Algorithms 1-4 of the paper, transcribed: one token, one head, one prototype at a time. Read it
beside the paper.

What the paper leaves open is marked "settled". It is slow on purpose and shares with the fast code
only the rotation of keys, the k-means fit, the seed of a step's draw and the order of slots in a
merge.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from protokv.core.rotary import Rotary, rotate, unrotate
from protokv.core.step import StepKV
from protokv.core.tensors import MemoryShape
from protokv.memories.paper import residuals as quantizer
from protokv.memories.paper.maintenance import (
    MERGE_PASSES,
    make_paper_merge_order,
    make_paper_seed,
)


@dataclass(slots=True)
class Token:
    """A token of one head: key (rotation removed) and value, `[D]` each, coordinates `[2]`,
    position `[P]`.
    """

    key: Tensor
    value: Tensor
    coordinates: Tensor
    position: Tensor


@dataclass(slots=True, eq=False)
class Prototype:
    """Pi_k = (c_k, p_k, n_k, R_k, mu_k, Sigma_k, tau_k); settled: tau_k is `position` and
    `last_step`.
    """

    key_center: Tensor
    value_center: Tensor
    mass: int
    mean: Tensor
    covariance: Tensor
    position: Tensor
    last_step: int
    key_counts: Tensor
    value_counts: Tensor
    updates: int = 0
    merged_into: Prototype | None = None


@dataclass(slots=True)
class Head:
    """The bank of one layer and head. `None` is an inactive slot; `used` slots held a prototype
    once.
    """

    slots: list[Prototype | None]
    used: set[int] = field(default_factory=set)
    reservoir: list[tuple[Tensor, Tensor, Prototype]] = field(default_factory=list)
    key_codebook: Tensor | None = None
    value_codebook: Tensor | None = None
    # For each token: the slot that it was absorbed by and by how much that one won, or (slot, inf)
    # if it opened it.
    decisions: list[tuple[int, float]] = field(default_factory=list)


class NaiveProtoKV:
    """The paper's memory without its prompt prefix: `append` a step, then look at
    `heads[layer][head]`.
    """

    def __init__(self, config: Any, shape: MemoryShape, rotary: Rotary) -> None:
        self.config = config
        self.shape = shape
        self.rotary = rotary
        self.near: list[tuple[int, list[list[Token]]]] = []
        self.heads = [
            [Head([None] * config.prototypes) for _ in range(shape.kv_heads)]
            for _ in range(shape.layers)
        ]

    # Algorithm 1

    def append(self, step: StepKV) -> None:
        """ProtoKV streaming update; settled: eviction and maintenance go by whole steps."""
        tokens = self._split(step)
        evicted: list[list[Token]] = []
        while (
            self.near
            and sum(len(held) for _, held in self.near) + len(tokens) > self.config.near_tokens
        ):
            evicted += self.near.pop(0)[1]
        surplus = max(0, len(tokens) - self.config.near_tokens)
        evicted += tokens[:surplus]
        if tokens[surplus:]:
            self.near.append((step.step, tokens[surplus:]))
        if not evicted or not self.config.prototypes:
            return
        for layer in range(self.shape.layers):
            for head in range(self.shape.kv_heads):
                bank = self.heads[layer][head]
                for everywhere in evicted:
                    self._absorb(bank, everywhere[layer * self.shape.kv_heads + head], step.step)
        self._maintain(step.step)

    def _split(self, step: StepKV) -> list[list[Token]]:
        """The step's tokens in raster order; of each, one `Token` per layer and head."""
        cos, sin = self.rotary(step.positions)
        keys = unrotate(step.keys.float(), (cos, sin))
        values = step.values.float()
        keys = keys.flatten(0, 1)
        values = values.flatten(0, 1)
        return [
            [
                Token(keys[h, t], values[h, t], step.coordinates[t], step.positions[t].double())
                for h in range(len(keys))
            ]
            for t in range(len(step.positions))
        ]

    def _absorb(self, bank: Head, token: Token, now: int) -> None:
        config = self.config
        if None in bank.slots:
            slot = bank.slots.index(None)
            self._initialize(bank, slot, token, now)
            bank.decisions.append((slot, math.inf))
            return
        costs = self._costs(
            [prototype for prototype in bank.slots if prototype is not None], token, now
        )
        slot = min(range(len(costs)), key=costs.__getitem__)
        others = costs[:slot] + costs[slot + 1 :]
        bank.decisions.append((slot, min(others, default=math.inf) - costs[slot]))
        best = bank.slots[slot]
        assert best is not None
        best.key_center = (1 - config.key_rate) * best.key_center + config.key_rate * token.key
        best.value_center = (
            1 - config.value_rate
        ) * best.value_center + config.value_rate * token.value
        best.mass += 1
        if config.anchor == "recent":
            best.position = token.position
        elif config.anchor == "average":
            best.position = best.position + (token.position - best.position) / best.mass
        best.last_step = now
        best.mean = (1 - config.spatial_rate) * best.mean + config.spatial_rate * token.coordinates
        spread = torch.outer(token.coordinates - best.mean, token.coordinates - best.mean)
        best.covariance = (1 - config.spatial_rate) * best.covariance + config.spatial_rate * spread
        if self.config.residual:
            # Settled: residuals are taken against the updated centre.
            self._count(bank, best, token.key - best.key_center, token.value - best.value_center)

    def _initialize(self, bank: Head, slot: int, token: Token, now: int) -> None:
        keys, values = (
            torch.zeros(self.config.subquantizers, self.config.codewords, dtype=torch.int64)
            for _ in range(2)
        )
        where = token.coordinates, torch.eye(2), token.position
        bank.slots[slot] = Prototype(token.key, token.value, 1, *where, now, keys, values)
        bank.used.add(slot)

    def _costs(self, prototypes: list[Prototype], token: Token, now: int) -> list[float]:
        """Equation 1 for each; settled: the squared Mahalanobis distance, with Sigma + 1e-4 I."""
        keys, means, spreads = (
            torch.stack([getattr(prototype, name) for prototype in prototypes])
            for name in ("key_center", "mean", "covariance")
        )
        norms = max(float(token.key.norm()), 1e-12) * keys.norm(dim=1).double().clamp_min(1e-12)
        cosine = (keys @ token.key).double() / norms
        offset = (token.coordinates - means).double()
        inverse = torch.linalg.inv(spreads.double() + 1e-4 * torch.eye(2).double())
        mahalanobis = torch.einsum("ki,kij,kj->k", offset, inverse, offset)
        idle = torch.tensor(
            [now - prototype.last_step > self.config.idle_steps for prototype in prototypes]
        )
        costs = -cosine + self.config.spatial_weight * mahalanobis + self.config.idle_weight * idle
        return list(costs.tolist())

    def _count(
        self, bank: Head, prototype: Prototype, key_residual: Tensor, value_residual: Tensor
    ) -> None:
        """Update R_k; settled: codebooks are fitted to a head's first residuals, which are then
        counted.
        """
        prototype.updates += 1
        if bank.key_codebook is not None and bank.value_codebook is not None:
            _add(prototype, bank.key_codebook, bank.value_codebook, key_residual, value_residual)
            return
        bank.reservoir.append((key_residual, value_residual, prototype))
        if len(bank.reservoir) == self.config.warmup_residuals:
            G = self.config.subquantizers
            C = self.config.codewords
            bank.key_codebook = quantizer.fit_codebook(
                torch.stack([key for key, _, _ in bank.reservoir]), G, C
            )
            bank.value_codebook = quantizer.fit_codebook(
                torch.stack([value for _, value, _ in bank.reservoir]), G, C
            )
            for key, value, owner in bank.reservoir:
                while owner.merged_into is not None:
                    owner = owner.merged_into
                _add(owner, bank.key_codebook, bank.value_codebook, key, value)

    # Algorithm 2

    def _maintain(self, now: int) -> None:
        """Prototype maintenance; settled: once a step, and one draw of random numbers serves all
        heads.
        """
        heads = [bank for layer in self.heads for bank in layer]
        for bank in heads:
            if self.config.decay != "off":
                self._decay(bank, now)
            if self.config.merge:
                self._merge(bank)
        freed = [[slot for slot in sorted(bank.used) if bank.slots[slot] is None] for bank in heads]
        if not self.config.recycle or not any(freed) or not self.near:
            return
        newest = self.near[-1][1]
        generator = torch.Generator().manual_seed(make_paper_seed(self.config.seed, now))
        draw = torch.rand(len(heads), len(newest), generator=generator)
        for h, bank in enumerate(heads):
            order = sorted(range(len(newest)), key=draw[h].tolist().__getitem__)
            for slot, t in zip(freed[h], order, strict=False):
                self._initialize(bank, slot, newest[t][h], now)

    def _decay(self, bank: Head, now: int) -> None:
        """In each step, or once each T_idle steps: in step T_idle + 1, 2 T_idle + 1, ... of
        idleness.
        """
        T_idle = self.config.idle_steps
        for slot, prototype in enumerate(bank.slots):
            if prototype is None:
                continue
            age = now - prototype.last_step
            ends = T_idle == 0 or age in range(T_idle + 1, age + 1, T_idle)
            if age > T_idle and (self.config.decay == "floor" or ends):
                prototype.mass = math.floor(self.config.kept_mass * prototype.mass)
                if prototype.mass == 0:
                    bank.slots[slot] = None

    def _merge(self, bank: Head) -> None:
        """Settled: root-mean-square distances, some passes over those with a close one, in the
        order of `make_paper_merge_order`."""
        order = [
            slot for slot in make_paper_merge_order(len(bank.slots)) if bank.slots[slot] is not None
        ]
        if not order:
            return
        members = {slot: [slot] for slot in order}
        close = self._close(bank, members)
        left = [slot for slot in order if any(slot in pair for pair in close)]
        for _ in range(MERGE_PASSES if left else 0):
            close = self._close(bank, {slot: members[slot] for slot in left})
            stays = [slot for slot in left if not any(other == slot for _, other in close)]
            goes: dict[int, int] = {}
            for slot, later in close:
                if slot in stays:
                    goes.setdefault(later, slot)
            for slot, into in goes.items():
                members[into] += members.pop(slot)
            left = [slot for slot in left if slot in members]
        for leader, group in members.items():
            for gone in sorted(group, key=order.index)[1:]:
                one = bank.slots[leader]
                other = bank.slots[gone]
                assert one is not None
                assert other is not None
                self._merge_pair(one, other)
                bank.slots[gone] = None

    def _close(self, bank: Head, members: dict[int, list[int]]) -> list[tuple[int, int]]:
        """Which groups of prototypes are close, those with the earlier one's slot first, in
        order.
        """
        slots = list(members)
        keys, values = (
            torch.stack([self._center(bank, members[slot], name) for slot in slots])
            for name in ("key_center", "value_center")
        )
        pairs = []
        for place, slot in enumerate(slots):
            near = (keys[place] - keys).square().mean(1) < self.config.merge_key_distance**2
            near &= (values[place] - values).square().mean(1) < self.config.merge_value_distance**2
            pairs += [(slot, slots[other]) for other in range(place + 1, len(slots)) if near[other]]
        return pairs

    @staticmethod
    def _center(bank: Head, group: list[int], name: str) -> Tensor:
        held = [prototype for slot in group if (prototype := bank.slots[slot]) is not None]
        sums = torch.stack(
            [prototype.mass * getattr(prototype, name).double() for prototype in held]
        ).sum(0)
        return sums / sum(prototype.mass for prototype in held)

    def _merge_pair(self, one: Prototype, other: Prototype) -> None:
        """Settled: the masses before the merge weight everything, Sigma too; tau is the newer."""
        n = one.mass
        m = other.mass
        mean = (n * one.mean + m * other.mean) / (n + m)
        spreads = [
            each.covariance + torch.outer(each.mean - mean, each.mean - mean)
            for each in (one, other)
        ]
        one.key_center = (n * one.key_center + m * other.key_center) / (n + m)
        one.value_center = (n * one.value_center + m * other.value_center) / (n + m)
        one.covariance = (n * spreads[0] + m * spreads[1]) / (n + m)
        one.mean = mean
        newer = other.position[0] > one.position[0]
        older = other.position[0] < one.position[0]
        if self.config.anchor == "average":
            one.position = (n * one.position + m * other.position) / (n + m)
        elif newer if self.config.anchor == "recent" else older:
            one.position = other.position
        one.last_step = max(one.last_step, other.last_step)
        one.mass = n + m
        one.key_counts = one.key_counts + other.key_counts
        one.value_counts = one.value_counts + other.value_counts
        one.updates += other.updates
        other.merged_into = one

    # Algorithms 3 and 4

    def pseudo_tokens(
        self, layer: int, head: int
    ) -> list[tuple[int, list[tuple[Tensor, Tensor]], float]]:
        """Of each active prototype: its slot, S pairs of key (rotated to tau_k) and value, its
        bias.
        """
        bank = self.heads[layer][head]
        shown = []
        S = self.config.slots_per_prototype
        for slot, prototype in enumerate(bank.slots):
            if prototype is None:
                continue
            key_modes = value_modes = [torch.zeros(self.shape.head_size)] * S
            # Settled: while the codebooks are being collected for, all S pseudo-tokens are the
            # centre.
            if (
                prototype.updates
                and bank.key_codebook is not None
                and bank.value_codebook is not None
            ):
                key_modes = [
                    _join(bank.key_codebook, codes)
                    for codes in self._top_modes(prototype.key_counts, S)
                ]
                value_modes = [
                    _join(bank.value_codebook, codes)
                    for codes in self._top_modes(prototype.value_counts, S)
                ]
            cos, sin = self.rotary(prototype.position.round().long())
            shifted = [
                (prototype.key_center + key_modes[s], prototype.value_center + value_modes[s])
                for s in range(S)
            ]
            pairs = [(rotate(key, (cos, sin)), value) for key, value in shifted]
            share = {"log_n": prototype.mass, "log_n_over_s": prototype.mass / S, "off": 1.0}
            shown.append((slot, pairs, math.log(share[self.config.mass_bias])))
        return shown

    def _top_modes(self, counts: Tensor, S: int) -> list[tuple[int, ...]]:
        """The tuples of DecodeTopSResidualModes, with the beam of the paper."""
        G, C = counts.shape
        epsilon = quantizer.CODEBOOK_SMOOTHING
        beam: list[tuple[int, tuple[int, ...]]] = [(0, ())]
        for g in range(G):
            total = int(counts[g].sum())
            # In whole units of 2**-32, so that equal sums of logarithms are equal in any order of
            # adding.
            score = [
                round(math.log((int(n) + epsilon) / (total + C * epsilon)) * 2**32)
                for n in counts[g]
            ]
            longer = [(a + score[c], (*codes, c)) for a, codes in beam for c in range(C)]
            # Python's sort is stable: ties keep the order of the beam, then of the codes.
            beam = sorted(longer, key=lambda item: -item[0])[: 4 * S]
        best = [codes for _, codes in beam[:S]]
        return [best[s % len(best)] for s in range(S)]


def _add(
    prototype: Prototype, key_codebook: Tensor, value_codebook: Tensor, key: Tensor, value: Tensor
) -> None:
    """Count the nearest codewords of each subspace: H^K and H^V."""
    for g in range(len(key_codebook)):
        key_code = _nearest(key_codebook[g], g, key)
        value_code = _nearest(value_codebook[g], g, value)
        prototype.key_counts[g, key_code] += 1
        prototype.value_counts[g, value_code] += 1


def _nearest(codewords: Tensor, g: int, residual: Tensor) -> int:
    C, d = codewords.shape
    part = residual[g * d : (g + 1) * d]
    distances = (part - codewords).square().sum(1).tolist()
    return min(range(C), key=distances.__getitem__)


def _join(codebook: Tensor, codes: tuple[int, ...]) -> Tensor:
    return torch.cat([codebook[g, code] for g, code in enumerate(codes)])
