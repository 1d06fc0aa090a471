"""The blocked rule equals `naive_blocked` bit for bit, and keeps what it promises where the oracle has no say."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from protokv.core.bank import FarTokens, PrototypeBank, TokenPositions
from protokv.core.tensors import MemoryShape
from protokv.errors import ConfigError, StateCorrupt
from protokv.memories import DurableConfig
from protokv.memories.durable import blocked as schedule
from protokv.memories.durable import nearest as parts
from protokv.memories.durable import repeats
from protokv.memories.durable.agglomerative import Agglomerative
from protokv.memories.durable.blocked import BlockedRule, Schedule
from protokv.memories.durable.memory import Durable
from protokv.memories.durable.novelty import Novelty
from protokv.memories.durable.quantized import QuantizedBank
from tests.core.streams import World, copy_of, feed, same, shape_of
from tests.counting import Counting
from tests.oracles import blocked as naive_blocked
from tests.oracles.blocked import NaiveBlocked
from tests.oracles.invariants import check_bank

STATE = ("key_center", "value_center", "mass", "mean", "position", "last_step")
ATTRIBUTES = ("key", "value", "mass", "mean", "position", "last_step")


class Held:
    """A bank under the blocked rule."""

    def __init__(self, shape: MemoryShape, K: int, *, power: float = 1.0, quantized: bool = False) -> None:
        self.bank = (QuantizedBank if quantized else PrototypeBank)(shape, K, spread=False)
        settings = DurableConfig(
            budget=K,
            split=(0, 1),
            rule="blocked",
            merge_mass_power=power,
            center_bits=8 if quantized else 32,
        )
        assert settings.prototypes == K
        self.rule = BlockedRule(self.bank, settings, shape)

    def state(self) -> dict[str, Tensor]:
        bank = {name: getattr(self.bank, name).clone() for name in STATE}
        return bank | {name: tensor.clone() for name, tensor in self.rule.live_tensors().items()}


class Source:
    """Steps of tokens for `[L, H]` heads: of few exact values, where most costs tie, or of any."""

    def __init__(self, shape: MemoryShape, seed: int, kind: str) -> None:
        self.shape, self.kind = shape, kind
        self.generator = torch.Generator().manual_seed(seed)
        self.time = 0
        self.things = self._draw(9)
        # Of how many tokens one has no mass, as it is dropped or repeats another; 0: none. Half of the others weigh 4.
        self.drops = 0

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
        positions = (times[:, None] if P == 1 else torch.stack((times // 4, times % 2, times % 3), 1)).double()
        self.time += T
        seen = TokenPositions(torch.rand(T, 2, generator=self.generator), positions)
        mass = torch.ones(T, dtype=torch.int64)
        if self.drops:
            mass *= torch.rand(T, generator=self.generator) * self.drops >= 1
            mass *= torch.tensor([1, 4])[torch.randint(2, (T,), generator=self.generator)]
        return FarTokens(features[..., :D].contiguous(), features[..., D:].contiguous(), seen, mass)


KINDS = st.sampled_from(["whole", "any", "things"])


def compare(held: Held, naive: NaiveBlocked) -> None:
    bank = held.bank
    every = torch.arange(bank.mass.numel()).view(len(naive.heads), -1)
    fasts = (*bank.centers(every), *(getattr(bank, name).flatten(0, 1) for name in STATE[2:]))
    for number, head in enumerate(naive.heads):
        for name, attribute, found in zip(STATE, ATTRIBUTES, fasts, strict=True):
            fast = found[number]
            for slot, prototype in enumerate(head.slots):
                expected = torch.as_tensor(getattr(prototype, attribute)).to(fast.dtype)
                assert torch.equal(fast[slot], expected), (name, number, slot)
        assert (bank.mass.flatten(0, 1)[number, len(head.slots) :] == 0).all()
    check_bank(bank.live_tensors(), most=4)


@given(
    kind=KINDS,
    K=st.sampled_from([2, 3, 7, 19, 41, 67, 83, 131]),
    layers=st.integers(1, 2),
    heads=st.integers(1, 3),
    size=st.sampled_from([2, 5, 8, 128]),
    components=st.sampled_from([1, 3]),
    power=st.sampled_from([1.0, 1.0, 0.5, 0.0]),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    seed=st.integers(0, 2**16),
    share=st.sampled_from([20, 14, 5, 3]),
    width=st.sampled_from([64, 32]),
    drops=st.sampled_from([0, 0, 2, 9]),
    quantized=st.booleans(),
    shares=st.sampled_from([[0.0], [0.0, 0.4, 1.0], [1.0], [0.2, 0.7]]),
)
def test_the_rule_equals_the_rule_written_out_bit_for_bit(
    kind: str,
    K: int,
    layers: int,
    heads: int,
    size: int,
    components: int,
    power: float,
    lengths: list[int],
    seed: int,
    share: int,
    width: int,
    drops: int,
    quantized: bool,
    shares: list[float],
) -> None:
    shape = shape_of(layers=layers, heads=heads, size=size, components=components)
    source = Source(shape, seed, kind)
    source.drops = drops
    shares = [shares[head % len(shares)] for head in range(layers * heads)]
    # Plans that are a large part of a bank run out of proposals.
    with pytest.MonkeyPatch.context() as patch:
        for module in (schedule, naive_blocked):
            patch.setattr(module, "SHARE", share)
        patch.setattr(Novelty, "share", lambda _: torch.tensor(shares))
        for module in (parts, naive_blocked):
            patch.setattr(module, "WIDTH", width)
        held = Held(shape, K, power=power, quantized=quantized)
        naive = NaiveBlocked(K, layers * heads, merge_mass_power=power, quantized=quantized, shares=shares)
        for index, T in enumerate([K - K // 3, *lengths]):
            step = source.step(T)
            held.rule.absorb_(step, index)
            naive.absorb(
                step.keys,
                step.values,
                step.token_positions.coordinates,
                step.token_positions.positions,
                index,
                step.mass,
            )
    compare(held, naive)
    event(f"proposals are {'' if naive.barred else 'not '}barred")
    event("plans in turns" if naive.turns else "all plan at once")
    event("lines" if naive.lines else "no lines")


@settings(max_examples=10)
@given(st.lists(st.integers(1, 9), min_size=8, max_size=16), st.sampled_from([11, 19]), st.integers(0, 2**16))
def test_slots_that_dropped_tokens_left_free_are_taken_again(lengths: list[int], K: int, seed: int) -> None:
    shape = shape_of(heads=2)
    source, held = Source(shape, seed, "things"), Held(shape, K)
    source.drops, came = 2, 0
    for index, T in enumerate(lengths):
        step = source.step(T)
        held.rule.absorb_(step, index)
        came += int(step.mass.sum())
    source.drops = 0
    for index in range(len(lengths), len(lengths) + 2 * K):
        held.rule.absorb_(source.step(1), index)
    # No slot is lost for the rest of the stream, and no token counts for nothing.
    assert (held.bank.mass > 0).all()
    assert (held.bank.mass.sum(2) == came + 2 * K).all()


def test_what_the_rule_never_reads_is_no_state() -> None:
    shape = shape_of(heads=2)
    for rule, held in (("blocked", False), ("exact", True)):
        settings = DurableConfig(budget=60, rule=rule)
        assert ("bank.covariance" in {spec.name for spec in Durable.declare(settings, shape)}) == held


@pytest.mark.parametrize("rows", [1, 100])
def test_how_much_is_done_at_once_changes_no_byte(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def state() -> dict[str, Tensor]:
        shape = shape_of(heads=2, size=8)
        source, held = Source(shape, 1, "any"), Held(shape, 150)
        for index in range(14):
            held.rule.absorb_(source.step(17), index)
        return held.state()

    whole = state()
    monkeypatch.setattr(parts, "_ROWS", rows)
    assert same(whole, state())


@given(
    KINDS,
    st.sampled_from([41, 130]),
    st.lists(st.integers(1, 9), min_size=4, max_size=7),
    st.integers(0, 2**16),
    st.sampled_from([8, 32]),
)
def test_a_state_that_is_reloaded_at_every_step_keeps_its_bytes(
    kind: str, K: int, lengths: list[int], seed: int, bits: int
) -> None:
    settings = DurableConfig(budget=K, split=(1, 9), rule="blocked", center_bits=bits)
    shape = shape_of(heads=3)
    world = World(shape, seed)
    kept, reloaded = (Durable(settings, shape, world.rotary) for _ in range(2))
    sink = world.sink()
    kept.start(*sink)
    reloaded.start(*sink)
    for index, T in enumerate([K - 20, *lengths]):
        step = world.step(index, T)
        reloaded.load(copy_of(reloaded))
        kept.append(step)
        reloaded.append(step)
        assert same(copy_of(kept), copy_of(reloaded))
        one, other = kept.context(), reloaded.context()
        assert all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("keys", "values", "bias"))


@given(st.lists(st.integers(1, 19), min_size=2, max_size=9), st.integers(2, 90), st.integers(0, 2**16))
def test_every_token_is_in_some_prototype_and_none_is_hidden(lengths: list[int], K: int, seed: int) -> None:
    shape = shape_of(heads=2)
    source, held = Source(shape, seed, "things"), Held(shape, K)
    seen = 0
    # The first step leaves a third of the bank for the others to fill.
    for index, T in enumerate([K - K // 3, *lengths]):
        held.rule.absorb_(source.step(T), index)
        seen += T
        mass = held.bank.mass
        assert (mass.sum(2) == seen).all()
        assert ((mass > 0).sum(2) == min(K, seen)).all()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("plan.gone", lambda plan: plan.fill_(-1)),
        ("plan.into", lambda plan: plan.fill_(60)),
        ("plan.schedule", lambda plan: plan.fill_(61)),
    ],
)
def test_a_plan_that_leads_out_of_the_bank_is_refused(name: str, change: Callable[[Tensor], Tensor]) -> None:
    shape = shape_of(heads=2)
    world = World(shape, 0)
    memory = Durable(DurableConfig(budget=60, split=(0, 1), rule="blocked", center_bits=32), shape, world.rotary)
    feed(memory, world, [40, 18, 1, 1, 1])
    state = copy_of(memory)
    change(state[name])
    with pytest.raises(StateCorrupt, match=name.partition(".")[0]):
        memory.load(state)


def test_which_rule_serves_follows_the_size_of_the_bank_unless_it_is_set() -> None:
    assert Durable.rule_type(DurableConfig(budget=151)) is Agglomerative
    # What the embedded model has unless a budget is named, and the least of a 7B model.
    assert Durable.rule_type(DurableConfig(budget=512)) is Agglomerative
    assert Durable.rule_type(DurableConfig(budget=1000)) is BlockedRule
    assert Durable.rule_type(DurableConfig(budget=6000, rule="exact")) is Agglomerative
    assert Durable.rule_type(DurableConfig(budget=151, rule="blocked")) is BlockedRule
    with pytest.raises(ConfigError, match="at least two"):
        DurableConfig(rule="blocked", budget=2)


@given(st.integers(2, 5000), st.integers(1, 12), st.lists(st.integers(1, 300), min_size=1, max_size=60))
def test_a_schedule_never_runs_out_of_plans(K: int, heads: int, lengths: list[int]) -> None:
    schedule = Schedule(K, heads)
    for T in lengths:
        for part in schedule.parts_of(T):
            n = part.stop - part.start
            schedule.next_turn(n, T)
            merges = n - len(range(*schedule.open(n).indices(K)))
            schedule.carry_out(merges)
            assert max(schedule.done) <= schedule.merges


def test_heads_take_turns_evenly_once_the_bank_is_nearly_full() -> None:
    K, T = 18_000, 196
    schedule = Schedule(K, 112)
    planning = []
    for _ in range(K // T + 40):
        turn = schedule.next_turn(T, T)
        planning.append(0 if turn is None else len(range(*turn.indices(112))))
        opened = schedule.open(T)
        schedule.carry_out(T - (opened.stop - opened.start))
    groups = schedule.merges // T
    assert set(planning) <= {0, 112 // groups, 112 // groups + 1}
    assert sum(planning[-groups:]) == 112
    assert 0 not in planning[-40:]


def test_a_step_longer_than_a_plan_uses_its_plans_up() -> None:
    schedule, plans = Schedule(750, 160, filled=750), 0
    for _ in range(2 * schedule.merges):
        for part in schedule.parts_of(77):
            if schedule.next_turn(part.stop - part.start, 77) is not None:
                plans += 1
            schedule.carry_out(part.stop - part.start)
    assert plans == 2 * 77


@pytest.mark.parametrize("K", [3000, pytest.param(18_000, marks=pytest.mark.slow)])
def test_a_step_at_the_shapes_of_a_7b_model_asks_for_no_data_and_for_few_operations(
    K: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only a CPU works through a plan in parts.
    monkeypatch.setattr(parts, "_ROWS", 2**40)
    # No near window weighs these tokens.
    monkeypatch.setattr(repeats, "DEEP", 29)
    # With no data behind the tensors, a wait would raise.
    with FakeTensorMode(), torch.no_grad():
        held = Held(shape_of(layers=28, heads=4, size=128, components=3, dtype=torch.bfloat16), K)
        tokens = torch.zeros(112, 196, 128)
        places = TokenPositions(torch.zeros(196, 2), torch.zeros(196, 3))
        step = FarTokens(tokens, tokens, places, torch.ones(196, dtype=torch.int64))
        for index in range(K // 196 + 5):
            held.rule.absorb_(step, index)
        with Counting() as counting:
            counts = []
            for index in range(4):
                counting.operations.clear()
                held.rule.absorb_(step, K + index)
                counts.append(counting.operations.total())
    assert not counting.waits
    assert len(set(counts)) == 1
    # Of these, up to 38 keep the newest and the first tokens from merging where a stream repeats nothing.
    assert counts[0] <= 174, counting.operations
