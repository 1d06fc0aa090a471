"""The rule equals the rule written out, a step at a time, and keeps its promises where rounding has
a say.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st
from torch import Tensor

from protokv.core.attention import attend
from protokv.core.bank import FarTokens
from protokv.core.slots import KVSlots
from protokv.core.step import StepKV
from protokv.core.tensors import TensorDict
from protokv.device import arrays
from protokv.memories.durable import repeats, rule
from protokv.memories.durable.bank import DurableBank, QuantizedBank
from protokv.memories.durable.memory import DurableMemory
from protokv.memories.durable.rule import DurableRule
from tests.core.streams import World, copy_of, feed, same, shape_of, slots_of, small_durable
from tests.oracles.durable import Point, Protection, Step, cluster, fold, weigh
from tests.oracles.invariants import check_bank
from tests.oracles.quantized import round_center


class Watched(DurableRule):
    """Compares every step with the rule written out, from the state before it."""

    compared = 0

    def absorb_(
        self, tokens: FarTokens, step: int, numbers: Tensor, newest: Callable[[], FarTokens]
    ) -> tuple[Tensor, ...]:
        bank = self._bank
        before = self._points()
        keeps = []
        shares = []
        weighed = tokens.mass
        for head, repeated in enumerate(self._novelty._repeated.tolist()):
            opened = int(bank.opened.flatten()[head])
            held = Protection(
                self._novelty._prototypes,
                self._novelty._near_tokens,
                self._novelty._budget,
                self._novelty._seen,
                int(repeated),
                opened,
            )
            keeps.append(held)
            shares.append(held.share())
        if self._repeats is not None:
            weights = self._repeats._weights[: len(weighed)]
            counts = int(bank.opened[0, 0]), int(bank.absorbed[0, 0])
            weighed = torch.tensor(weigh(weights.tolist(), *counts))
        chosen: list[Tensor] = []
        # Rows that are no candidates stay as they are.
        find = self._candidates

        def note(*given: Any) -> Tensor:
            chosen.append(find(*given))
            return chosen[-1]

        with patch.object(self, "_candidates", note):
            changed = super().absorb_(tokens, step, numbers, newest)
        after, (B, K, _), signs = (
            self._points(),
            self._size,
            rule.draw_sketch_signs(2 * tokens.keys.shape[2]).tolist(),
        )
        rows = torch.cat(chosen).view(B, -1) % K if chosen else torch.arange(K).expand(B, K)
        for head in range(B):
            mine = rows[head].tolist()
            points = [before[head][row] for row in mine]
            for t, mass in enumerate(weighed.tolist()):
                center = torch.cat((tokens.keys[head, t], tokens.values[head, t])).tolist()
                where = [place if mass else 0 for place in tokens.positions[t].tolist()]
                points.append(Point(center, mass, step if mass else -1, where))
            for point in points:
                point.sketch = torch.tensor(fold(point.center, signs)).to(self._dtype).tolist()
                point.kept = point.mass > 0 and keeps[head].keeps(point.last, step, len(weighed))
            found = Step(points, len(weighed), deep=self._repeats is not None)
            if found.ambiguous:
                continue
            expected = [
                cluster(points, members, shares[head] > 0) for members in found.groups.values()
            ]
            for row in set(range(K)) - set(mine):
                expected.append(before[head][row])
            self._compare(expected, after[head])
            type(self).compared += 1
        return changed

    def _points(self) -> list[list[Point]]:
        bank, (B, K, _) = self._bank, self._size
        centers = bank.read(torch.arange(B * K)).view(B, K, -1).tolist()
        rest = [
            getattr(bank, name).flatten(0, 1).tolist() for name in ("mass", "last_step", "position")
        ]
        return [
            [Point(*numbers) for numbers in zip(*head, strict=True)]
            for head in zip(centers, *rest, strict=True)
        ]

    def _compare(self, expected: list[Point], found: list[Point]) -> None:
        key = attrgetter("mass", "last", "position")
        loose = isinstance(self._bank, QuantizedBank)
        for one, other in zip(sorted(expected, key=key), sorted(found, key=key), strict=True):
            assert (one.mass, one.last) == (other.mass, other.last)
            # A mean halfway between two positions may be rounded to either.
            assert one.position == pytest.approx(other.position, abs=1)
            most = max(map(abs, one.center), default=0.0)
            assert one.center == pytest.approx(
                other.center, abs=most / 60 if loose else 1e-4 * max(most, 1)
            )


# The tests of numbers have more examples.
@pytest.mark.numbers
@given(
    budget=st.integers(5, 33) | st.integers(5, 7),
    split=st.sampled_from([(1, 3), (1, 1), (0, 1)]),
    bits=st.sampled_from([8, 32]),
    heads=st.integers(1, 2),
    size=st.sampled_from([5, 8, 34, 64]),
    components=st.sampled_from([1, 3]),
    seed=st.integers(0, 2**16),
    lengths=st.lists(st.integers(1, 9) | st.just(40), min_size=4, max_size=7),
    things=st.sampled_from([2, 12, 400]),
    still=st.sampled_from([0.0, 0.5]),
    whole=st.sampled_from([128, 6]),
    bad=st.integers(0, 5),
    device=st.booleans(),
    rounds=st.booleans(),
    deep=st.sampled_from([1, 12]),
)
def test_a_step_equals_the_step_written_out(
    budget: int,
    split: tuple[int, int],
    bits: int,
    heads: int,
    size: int,
    components: int,
    seed: int,
    lengths: list[int],
    things: int,
    still: float,
    whole: int,
    bad: int,
    device: bool,
    rounds: bool,
    deep: int,
) -> None:
    shape = shape_of(layers=1, heads=heads, size=size, components=components)
    world = World(shape, seed, noise=0.5, things=things, still=still)
    with pytest.MonkeyPatch.context() as patch:
        # Small banks stand for large ones.
        patch.setattr(rule, "WHOLE_BANK_PROTOTYPES", whole)
        patch.setattr(rule, "multiplies_bfloat16", lambda device: rounds)
        patch.setattr(repeats, "DEEP_MODEL_LAYERS", deep)
        patch.setattr(DurableMemory, "rule", Watched)
        if device:
            # Only a CPU reads in numpy.
            patch.setattr(arrays, "is_readable_by_numpy", lambda numbers: False)
        memory = DurableMemory(
            small_durable(budget, split=split, center_bits=bits), shape, world.rotary
        )
        memory.start(*world.sink())
        compared = Watched.compared
        for index, T in enumerate(lengths):
            step = world.step(index, T)
            if index % 3 == 2:
                step.keys[0, 0, min(bad, T - 1), 0] = torch.nan
            memory.append(step)
    event("compared" if Watched.compared > compared else "ties alone")


def test_most_steps_are_compared_and_not_left_out_for_their_ties(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DurableMemory, "rule", Watched)
    world = World(shape_of(heads=1), 3, things=400)
    memory = DurableMemory(small_durable(29), world.shape, world.rotary)
    compared = Watched.compared
    feed(memory, world, [5] * 20)
    assert Watched.compared - compared >= 30


class Doubles(World):
    """A stream of few exact values, where most costs tie and many are 0."""

    def step(self, index: int, tokens: int) -> StepKV:
        step = super().step(index, tokens)
        keys = torch.randint(-1, 2, step.keys.shape, generator=self.generator).float()
        return replace(
            step, keys=keys, values=keys.flip(-1), positions=torch.zeros_like(step.positions)
        )


WORLDS = st.sampled_from([World, Doubles, partial(World, things=1000, noise=3.0)])


@given(
    world_type=WORLDS,
    lengths=st.lists(st.integers(1, 9) | st.integers(1, 150), min_size=3, max_size=9),
    budget=st.integers(5, 40) | st.integers(220, 400),
    bits=st.sampled_from([8, 32]),
    deep=st.sampled_from([1, 12]),
    seed=st.integers(0, 2**16),
)
def test_no_token_is_lost_and_a_state_that_is_reloaded_at_every_step_keeps_its_bytes(
    world_type: Any, lengths: list[int], budget: int, bits: int, deep: int, seed: int
) -> None:
    config = small_durable(budget, center_bits=bits)
    world = world_type(shape_of(heads=3, size=16), seed, still=0.4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repeats, "DEEP_MODEL_LAYERS", deep)
        kept, reloaded = (DurableMemory(config, world.shape, world.rotary) for _ in range(2))
        sink = world.sink()
        came = 0
        for memory in (kept, reloaded):
            memory.start(*sink)
        for index, tokens in enumerate(lengths):
            step = world.step(index, tokens)
            reloaded.load(copy_of(reloaded))
            kept.append(step)
            reloaded.append(step)
            assert same(copy_of(kept), copy_of(reloaded))
            came += tokens
            state = kept.tensors()
            mass = state["bank.mass"]
            gone = came - kept.report()["near_tokens_in_use"]
            # Repeats do not enter, and what they repeat weighs more.
            assert (state["bank.opened"] + state["bank.absorbed"] == gone).all()
            assert (state["bank.opened"] - state["bank.merged"] == (mass > 0).sum(2)).all()
            if deep > 1:
                assert (mass.sum(2) == gone).all()
                assert ((mass > 0).sum(2) == min(gone, config.prototypes)).all()
            check_bank(state, most=4)


# A product with few columns is rounded otherwise.
@pytest.mark.parametrize("at_once", [400, 3000])
def test_how_much_is_done_at_once_changes_no_byte(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def state() -> TensorDict:
        world = World(shape_of(heads=3, size=16), 5)
        memory = DurableMemory(small_durable(280, center_bits=8), world.shape, world.rotary)
        feed(memory, world, [17, 40, 9, *[23] * 14])
        return copy_of(memory)

    whole = state()
    monkeypatch.setattr(rule, "_AT_ONCE", {"cpu": at_once})
    assert same(whole, state())


@pytest.mark.parametrize("budget", [24, 210])
def test_what_is_distinct_stays_exact_however_much_is_redundant(budget: int) -> None:
    world = World(shape_of(layers=1, heads=2), seed=3, things=4, noise=0.1)
    memory = DurableMemory(small_durable(budget, split=(0, 1)), world.shape, world.rotary)
    memory.start(*world.sink())
    cue = world.step(0, 1)
    cue = replace(cue, keys=cue.keys * 20, values=cue.values * 20)
    memory.append(cue)
    for index in range(1, 90):
        memory.append(world.step(index, 9))
    state = memory.tensors()
    for head in range(2):
        slot = int((state["bank.value_center"][0, head] == cue.values[0, head, 0]).all(1).nonzero())
        assert int(state["bank.mass"][0, head, slot]) == 1
        assert int(state["bank.last_step"][0, head, slot]) == 0
        assert torch.equal(state["bank.position"][0, head, slot], cue.positions[0].int())


@pytest.mark.parametrize("scale", [0.0, 1e-40, 1e-30, 1.0, 1e37])
def test_centres_are_rounded_as_written_out(scale: float) -> None:
    shape = shape_of(layers=1, heads=1, size=12)
    bank = QuantizedBank(shape, 60, KVSlots(shape, far=60, near=0))
    generator = torch.Generator().manual_seed(2)
    centers = torch.randn(60, 24, generator=generator) * scale
    mass = torch.arange(60) * 37 % 1500
    rows = torch.arange(60)
    found, shown = bank.write_(rows, centers, mass)
    assert torch.equal(found, bank.read(rows))
    assert torch.equal(shown, bank.centers(rows)[0])
    for row in range(1, 60):
        key, value = centers[row].split(12)
        assert torch.equal(found[row], torch.cat(round_center(key, value, int(mass[row])))), row


@pytest.mark.parametrize("words", [True, False])
@pytest.mark.parametrize("deep", [True, False])
def test_who_goes_depends_on_the_sizes_of_masses_in_a_deep_model_alone(
    deep: bool, words: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeats, "DEEP_MODEL_LAYERS", 1 if deep else 99)
    shape = shape_of(layers=1, heads=20, size=16)
    config = small_durable(96, split=(0, 1), words=True)
    own = config.of_words() if words else config
    assert own is not None
    merging = DurableRule(DurableBank(shape, 24), own, shape)
    generator = torch.Generator().manual_seed(4)
    mass = torch.randint(0, 30, (20, 24), generator=generator)
    sketch = merging._sketch(torch.randn(20, 24, 32, generator=generator), mass > 0)
    kept = torch.rand(mass.shape, generator=generator) < 0.2
    # The same order of masses, and other ratios.
    one, other = (merging._choose(sketch, some, kept, 8) for some in (mass, 7 * mass**2))
    assert all(map(torch.equal, one, other)) != deep


def _used(memory: DurableMemory) -> int:
    """How many prototypes the rule has used."""
    assert isinstance(memory._rule, DurableRule)
    assert memory._rule.prototypes_used is not None
    return memory._rule.prototypes_used


@given(
    st.lists(st.integers(1, 90), min_size=1, max_size=12),
    st.integers(260, 400),
    st.integers(0, 2**16),
)
def test_a_cpu_reads_no_slot_that_never_held_anything_and_gets_what_it_gets_from_all(
    lengths: list[int], budget: int, seed: int
) -> None:
    world = World(shape_of(heads=2, size=16, components=3), seed)
    memory = DurableMemory(small_durable(budget), world.shape, world.rotary)
    steps = feed(memory, world, lengths)
    context = slots_of(memory)
    query = steps[-1].keys[0].repeat_interleave(2, 0)
    whole = replace(context, parts=(slice(None),))
    some, all_slots = ([*one.at(0, query)] for one in (context, whole))
    read, slots = (sum(segment.keys.shape[1] for segment in one) for one in (some, all_slots))
    used = _used(memory)
    prototypes = memory._config.prototypes
    assert read == slots - prototypes + used
    local = steps[-1].keys[0], steps[-1].values[0]
    torch.testing.assert_close(
        attend(query, some, local, 0.3), attend(query, all_slots, local, 0.3)
    )
    # Places are of the slots that are read.
    assert context.positions_at(0).shape[1] == read
    again = DurableMemory(small_durable(budget), world.shape, world.rotary)
    again.load(copy_of(memory))
    assert _used(again) == used
    event("all" if used == prototypes else "some")
