"""The blocked rule equals `naive_blocked` bit for bit, and keeps what it promises where the oracle has no say."""

from __future__ import annotations

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st
from torch import Tensor

from protokv.errors import StateCorrupt
from protokv.memory.base import MemoryShape
from protokv.memory.protokv.bank import PrototypeBank, Seen
from protokv.memory.protokv import naive_blocked
from protokv.memory.protokv.blocked import nearest, parts, schedule
from protokv.memory.protokv.blocked.rule import BlockedRule
from protokv.memory.protokv.blocked.schedule import Schedule, merges_of
from protokv.memory.protokv.continuity import FarTokens
from protokv.memory.protokv.naive_blocked import NaiveBlocked
from tests.memory.streams import shape_of

STATE = ("key_center", "value_center", "mass", "mean", "position", "last_step")


class Held:
    """A bank under the blocked rule."""

    def __init__(self, shape: MemoryShape, K: int, *, anchor: str = "recent", power: float = 1.0) -> None:
        self.bank = PrototypeBank.empty(shape, K)
        self.rule = BlockedRule(self.bank, shape, anchor=anchor, merge_mass_power=power)

    def state(self) -> dict[str, Tensor]:
        bank = {name: getattr(self.bank, name).clone() for name in STATE}
        return bank | {name: tensor.clone() for name, tensor in self.rule.tensors().items()}


class Source:
    """Steps of tokens for `[L, H]` heads: of few exact values, where most costs tie, or of any."""

    def __init__(self, shape: MemoryShape, seed: int, kind: str) -> None:
        self.shape, self.kind = shape, kind
        self.generator = torch.Generator().manual_seed(seed)
        self.time = 0
        self.things = self._draw(9)

    def _draw(self, n: int) -> Tensor:
        size = (self.shape.layers * self.shape.kv_heads, n, 2 * self.shape.head_size)
        if self.kind == "whole":
            return torch.randint(-3, 4, size, generator=self.generator).float()
        return torch.randn(size, generator=self.generator)

    def step(self, T: int) -> FarTokens:
        features = self._draw(T)
        if self.kind == "things":
            features = self.things[:, torch.randint(9, (T,), generator=self.generator)] + 0.1 * features
        D, P = self.shape.head_size, self.shape.position_components
        times = self.time + torch.arange(T)
        positions = (times[:, None] if P == 1 else torch.stack((times // 4, times % 2, times % 3), 1)).float()
        self.time += T
        seen = Seen(torch.rand(T, 2, generator=self.generator), positions)
        return FarTokens(features[..., :D].contiguous(), features[..., D:].contiguous(), seen)


KINDS = st.sampled_from(["whole", "any", "things"])


def compare(held: Held, naive: NaiveBlocked) -> None:
    bank = held.bank
    for number, head in enumerate(naive.heads):
        for name, attribute in zip(STATE, ("key", "value", "mass", "mean", "position", "last_step"), strict=True):
            fast = getattr(bank, name).flatten(0, 1)[number]
            for slot, prototype in enumerate(head.slots):
                expected = torch.as_tensor(getattr(prototype, attribute)).to(fast.dtype)
                assert torch.equal(fast[slot], expected), (name, number, slot)
        assert (bank.mass.flatten(0, 1)[number, len(head.slots) :] == 0).all()


@given(
    kind=KINDS,
    K=st.sampled_from([2, 3, 7, 19, 41, 67, 83, 131]),
    layers=st.integers(1, 2),
    heads=st.integers(1, 3),
    size=st.sampled_from([2, 5, 8]),
    components=st.sampled_from([1, 3]),
    anchor=st.sampled_from(["recent", "first", "average"]),
    power=st.sampled_from([1.0, 1.0, 0.5, 0.0]),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    seed=st.integers(0, 2**16),
    share=st.sampled_from([20, 5, 3]),
)
def test_the_rule_equals_the_rule_written_out_bit_for_bit(
    kind: str,
    K: int,
    layers: int,
    heads: int,
    size: int,
    components: int,
    anchor: str,
    power: float,
    lengths: list[int],
    seed: int,
    share: int,
) -> None:
    shape = shape_of(layers=layers, heads=heads, size=size, components=components)
    source = Source(shape, seed, kind)
    # Plans that are a large part of a bank run out of proposals.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "SHARE", share)
        patch.setattr(naive_blocked, "SHARE", share)
        held = Held(shape, K, anchor=anchor, power=power)
        naive = NaiveBlocked(K, layers * heads, anchor=anchor, merge_mass_power=power)
        for index, T in enumerate([K - K // 3, *lengths]):
            step = source.step(T)
            held.rule.absorb_(step, index)
            naive.absorb(step.keys, step.values, step.seen.coordinates, step.seen.positions, index)
    compare(held, naive)
    event("plans in turns" if naive.turns else "all plan at once")
    event("lines" if naive.lines else "no lines")
