"""The agglomerative bank equals `naive_ward`, and keeps its promises where costs tie and the oracle has no say."""

from __future__ import annotations

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor

from protokv.core.step import StepKV
from protokv.memories.durable import agglomerative, novelty, repeats, ward
from protokv.memories.durable.memory import Durable
from tests.core.streams import World, copy_of, feed, same, shape_of, small_durable
from tests.memories.paper.test_oracle import compare_context, compare_state, watched_by_both
from tests.oracles import ward as naive_ward
from tests.oracles.ward import NaiveAgglomerative
from tests.tolerance import near


@given(
    config=st.fixed_dictionaries(
        {
            "budget": st.integers(5, 33) | st.integers(5, 7),
            "split": st.sampled_from([(1, 3), (1, 1), (0, 1)]),
            "merge_mass_power": st.sampled_from([1.0, 0.5, 0.0]),
        }
    ),
    quantized=st.booleans(),
    layers=st.integers(1, 2),
    heads=st.integers(1, 3),
    size=st.sampled_from([8, 12, 34, 64]),
    components=st.sampled_from([1, 3]),
    seed=st.integers(0, 2**16),
    lengths=st.lists(st.integers(1, 7), min_size=5, max_size=14),
    things=st.sampled_from([2, 12, 400]),
    noise=st.sampled_from([0.05, 0.3, 1.0]),
    dull=st.integers(0, 2),
    still=st.sampled_from([0.0, 0.3, 0.9]),
)
def test_the_fast_bank_equals_merging_written_out(
    config: dict[str, object],
    quantized: bool,
    layers: int,
    heads: int,
    size: int,
    components: int,
    seed: int,
    lengths: list[int],
    things: int,
    noise: float,
    dull: int,
    still: float,
) -> None:
    settings = small_durable(**config, center_bits=8 if quantized else 32)
    shape = shape_of(layers=layers, heads=heads, size=size, components=components)
    world = World(shape, seed, noise=noise, things=things, still=still)
    # The first heads see two things only.
    for held in (world.keys, world.values):
        held[:, :dull] = held[:, :dull, torch.arange(things) % 2]
    with pytest.MonkeyPatch.context() as patch:
        # Streams this short would say too little.
        for module in (novelty, naive_ward):
            patch.setattr(module, "AT_FIRST", 1)
        patch.setattr(repeats, "DEEP", 1)
        fast, naive = Durable(settings, shape, world.rotary), NaiveAgglomerative(settings, shape, world.rotary)
        fast.start(*world.sink())
        if len(list(watched_by_both(fast, naive, world, lengths))) == len(lengths):
            compare_state(fast, naive)
            compare_context(fast, naive)
            for name in ("seen", "repeated"):
                assert fast.tensors()[f"novelty.{name}"].flatten().tolist() == getattr(naive, name)
            shares = [float(naive._share(head)) > 0 for head in range(layers * heads)]
            event("all heads" if all(shares) else "some heads" if any(shares) else "no head")
            event(f"pairs are {'' if naive.barred else 'not '}barred")
            event(f"tokens are {'' if naive.again else 'not '}seen again")


class Doubles(World):
    """A stream of few exact values, where most costs tie and many are 0."""

    def step(self, index: int, tokens: int) -> StepKV:
        step = super().step(index, tokens)
        keys = torch.randint(-1, 2, step.keys.shape, generator=self.generator).float()
        positions = torch.zeros_like(step.positions)
        return StepKV(keys, keys.flip(-1), positions, step.coordinates, index)


WORLDS = st.sampled_from([World, Doubles])
LENGTHS = st.lists(st.integers(1, 9), min_size=3, max_size=9)


@given(WORLDS, LENGTHS, st.integers(5, 40), st.integers(0, 2**16))
def test_mass_is_conserved_and_no_more_than_k_are_alive(
    world_type: type[World], lengths: list[int], budget: int, seed: int
) -> None:
    settings = small_durable(budget=budget)
    world = world_type(shape_of(heads=3), seed)
    memory = Durable(settings, world.shape, world.rotary)
    feed(memory, world, lengths)
    evicted = sum(lengths) - memory.report()["near_tokens_in_use"]
    state = memory.tensors()
    mass = state["bank.mass"]
    assert (mass.sum(2) == evicted).all()
    assert ((mass > 0).sum(2) == min(evicted, settings.prototypes)).all()
    assert (state["bank.opened"] + state["bank.absorbed"] == evicted).all()
    assert (state["bank.opened"] - state["bank.merged"] == (mass > 0).sum(2)).all()
    assert int(state["bank.last_step"].max()) <= len(lengths) - 1


@given(WORLDS, LENGTHS, st.integers(5, 40), st.integers(0, 2**16), st.sampled_from([1.0, 0.5]))
def test_bounds_that_are_forgotten_at_every_step_change_no_byte(
    world_type: type[World], lengths: list[int], budget: int, seed: int, power: float
) -> None:
    settings = small_durable(budget=budget, merge_mass_power=power)
    world = world_type(shape_of(heads=2, size=16), seed)
    kept, reloaded = (Durable(settings, world.shape, world.rotary) for _ in range(2))
    sink = world.sink()
    kept.start(*sink)
    reloaded.start(*sink)
    for index, tokens in enumerate(lengths):
        step = world.step(index, tokens)
        reloaded.load(copy_of(reloaded))
        kept.append(step)
        reloaded.append(step)
        assert same(copy_of(kept), copy_of(reloaded))


def test_a_longer_stream_reloaded_now_and_then_keeps_its_bytes() -> None:
    world = World(shape_of(layers=2, heads=2, size=16), seed=4, things=150)
    settings = small_durable(budget=160, merge_mass_power=0.25)
    kept, reloaded = (Durable(settings, world.shape, world.rotary) for _ in range(2))
    sink = world.sink()
    kept.start(*sink)
    reloaded.start(*sink)
    for index in range(40):
        step = world.step(index, 14)
        if index % 3 == 0:
            reloaded.load(copy_of(reloaded))
        kept.append(step)
        reloaded.append(step)
    assert same(copy_of(kept), copy_of(reloaded))
    # Otherwise this says nothing: it must be a small part of the bank that was looked at.
    assert isinstance(kept._rule, agglomerative.Agglomerative)
    assert kept._rule._width < settings.prototypes


@settings(max_examples=8)
@given(st.integers(0, 2**16), st.permutations(range(6)))
def test_heads_know_nothing_of_each_other(seed: int, order: list[int]) -> None:
    shape = shape_of(layers=1, heads=6, size=8)
    settings = small_durable(budget=30)
    world = World(shape, seed)
    steps = [world.step(index, 5) for index in range(9)]
    sink = world.sink()
    states = []
    for heads in (list(range(6)), order):
        memory = Durable(settings, shape, world.rotary)
        memory.start(*sink)
        for step in steps:
            turned = StepKV(step.keys[:, heads], step.values[:, heads], step.positions, step.coordinates, step.step)
            memory.append(turned)
        states.append(copy_of(memory))
    bank = [name for name in states[0] if name.startswith("bank.")]
    assert all(torch.equal(states[0][name][:, order], states[1][name]) for name in bank)


@pytest.mark.parametrize("elements", [1, 300])
def test_blocks_and_a_first_guess_that_is_too_small_change_nothing(
    elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def state() -> dict[str, Tensor]:
        world = World(shape_of(heads=2, size=12), seed=5)
        memory = Durable(small_durable(budget=90), world.shape, world.rotary)
        memory.start(*world.sink())
        for index in range(40):
            memory.append(world.step(index, 1 + index * 5 % 11))
            assert isinstance(memory._rule, agglomerative.Agglomerative)
            if elements == 1:
                memory._rule._width = 0
        return copy_of(memory)

    whole = state()
    monkeypatch.setattr(agglomerative, "_BLOCK_ELEMENTS", elements)
    monkeypatch.setattr(ward, "_BLOCK_ELEMENTS", elements)
    assert same(whole, state())


def test_what_is_distinct_stays_exact_however_much_is_redundant() -> None:
    world = World(shape_of(layers=1, heads=2), seed=3, things=4, noise=0.1)
    settings = small_durable(budget=24, split=(0, 1))
    memory = Durable(settings, world.shape, world.rotary)
    memory.start(*world.sink())
    cue = world.step(0, 1)
    cue = StepKV(cue.keys * 20, cue.values * 20, cue.positions, cue.coordinates, 0)
    memory.append(cue)
    for index in range(1, 60):
        memory.append(world.step(index, 9))
    state = memory.tensors()
    for head in range(2):
        held = (state["bank.value_center"][0, head] == cue.values[0, head, 0]).all(1).nonzero()
        assert len(held) == 1
        slot = int(held)
        assert float(state["bank.mass"][0, head, slot]) == 1.0
        assert int(state["bank.last_step"][0, head, slot]) == 0
        assert torch.equal(state["bank.position"][0, head, slot], cue.positions[0].double())


def test_merged_tokens_stand_where_the_newest_of_them_does() -> None:
    world = World(shape_of(layers=1, heads=1, size=4, sink=0), seed=0)
    settings = small_durable(budget=1, split=(0, 1))
    memory = Durable(settings, world.shape, world.rotary)
    memory.start(*world.sink())
    for index, position in enumerate((2, 9, 7)):
        step = world.step(index, 1)
        memory.append(StepKV(step.keys, step.values, torch.tensor([[position]]), step.coordinates, index))
    assert memory.tensors()["bank.position"].tolist() == [[[[9.0]]]]
    assert memory.tensors()["bank.last_step"].tolist() == [[[2]]]


def test_a_point_of_no_mass_is_never_merged() -> None:
    points = torch.tensor([[[0.0, 0.0], [0.0, 0.0], [3.0, 0.0], [4.0, 0.0]]])
    mass = torch.tensor([[0.0, 2.0, 1.0, 1.0]])
    cost = ward.costs_between(points, mass)
    inf = torch.inf
    expected = [[inf, inf, inf, inf], [inf, inf, 6.0, 32 / 3], [inf, 6.0, inf, 0.5], [inf, 32 / 3, 0.5, inf]]
    torch.testing.assert_close(cost, torch.tensor([expected]), **near(torch.tensor([expected]), 4))
    merged = ward.merge_cheapest(cost, mass, torch.tensor([2]))
    assert merged.root.tolist() == [[0, 1, 1, 1]]
    assert float(merged.height[0]) == pytest.approx(2 * 2 / 4 * 3.5**2)
    assert merged.nearest.tolist() == [[inf, inf, inf, inf]]


def test_sets_may_ask_for_different_numbers_of_merges() -> None:
    points, mass = torch.randn(3, 7, 5, generator=torch.Generator().manual_seed(1)), torch.ones(3, 7)
    together = ward.merge_cheapest(ward.costs_between(points, mass), mass, torch.tensor([0, 5, 2]))
    for index, merges in enumerate((0, 5, 2)):
        cost = ward.costs_between(points[index : index + 1], mass[index : index + 1])
        alone = ward.merge_cheapest(cost, mass[index : index + 1], torch.tensor([merges]))
        assert torch.equal(together.root[index], alone.root[0])
        assert torch.equal(together.height[index], alone.height[0])
        assert len(set(together.root[index].tolist())) == 7 - merges
