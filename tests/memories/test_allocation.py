"""Far slots are dealt out by variance, and their content is a function of the state."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from protokv.core.near import Slots
from protokv.core.prototypes import ProtoKV
from protokv.errors import ConfigError
from protokv.memories import MemoryConfig, PaperConfig
from protokv.memories.paper.allocation import VarianceLayout, by_variance, variances
from tests.core.streams import World, copy_of, shape_of, small_config
from tests.tolerance import near


def dealt(variance: list[float], slots: int, alive: list[bool] | None = None) -> list[int]:
    living = [True] * len(variance) if alive is None else alive
    return by_variance(torch.tensor([variance], dtype=torch.float64), torch.tensor([living]), slots)[0].tolist()


@given(
    st.lists(st.tuples(st.sampled_from([0, 0, 1, 2, 3, 7, 100, 5000]), st.booleans()), min_size=1, max_size=9),
    st.integers(1, 6),
)
def test_shares_are_proportional_with_one_slot_for_everyone_alive(held: list[tuple[int, bool]], each: int) -> None:
    variance, alive = [v for v, _ in held], [a for _, a in held]
    slots = each * len(held)
    found = dealt([float(v) for v in variance], slots, alive)
    sharing = {k for k in range(len(held)) if alive[k] and variance[k]}
    assert [count > 0 for count in found] == alive
    assert sum(found) == (slots if sharing else sum(alive))
    # A prototype that would have less than one slot has one; the others share the rest.
    while True:
        left = slots - (sum(alive) - len(sharing))
        quota = {k: Fraction(left * variance[k], sum(variance[j] for j in sharing)) for k in sharing}
        if all(share >= 1 for share in quota.values()):
            break
        sharing = {k for k in sharing if quota[k] >= 1}
    for k, count in enumerate(found):
        if k in quota:
            # Weights are whole numbers of 2**-31 of the largest, so a share that is whole may be one unit less.
            assert math.floor(quota[k] - Fraction(1, 10**6)) <= count <= math.ceil(quota[k] + Fraction(1, 10**6))
        else:
            assert count == alive[k]


@pytest.mark.parametrize(
    ("variance", "slots", "expected"),
    [
        ([1.0, 1.0, 1.0], 8, [3, 3, 2]),
        ([0.0, 0.0], 8, [1, 1]),
        ([0.0, 5.0, 0.0], 9, [1, 7, 1]),
        ([3.0, 1.0], 8, [6, 2]),
        ([1.0, 1000.0, 1.0], 6, [1, 4, 1]),
        ([1e-30, 2e-30], 6, [2, 4]),
    ],
)
def test_fractions_of_a_slot_go_by_largest_remainder_and_ties_to_the_lower_index(
    variance: list[float], slots: int, expected: list[int]
) -> None:
    assert dealt(variance, slots) == expected


@given(st.lists(st.lists(st.integers(0, 5), min_size=4, max_size=4), min_size=1, max_size=3))
def test_every_slot_has_one_owner_and_those_of_one_prototype_are_together(counts: list[list[int]]) -> None:
    given_ = torch.tensor(counts)
    layout = VarianceLayout(Slots(shape_of(layers=1, heads=len(counts), sink=0), far=20, near=0), 4, 5)
    assert layout.owner.tolist() == [[0] * 5 + [1] * 5 + [2] * 5 + [3] * 5] * len(counts)
    layout.set_(torch.arange(len(counts)), given_)
    for head, row in enumerate(counts):
        expected = [k for k, count in enumerate(row) for _ in range(count)]
        assert layout.owner[head].tolist() == expected + [4] * (20 - len(expected))
    seen = torch.zeros_like(layout.owner)
    rows = torch.arange(4 * len(counts))
    for some, places, shown in layout.places_of(rows):
        assert shown is not None
        heads, slots = places // 20, places % 20
        assert torch.equal(layout.owner[heads[shown], slots[shown]], (some % 4)[:, None].expand_as(slots)[shown])
        seen[heads[shown], slots[shown]] += 1
    assert torch.equal(seen, (layout.owner < 4).long())


@pytest.mark.parametrize("histograms", ["independent", "joint"])
def test_the_variance_is_that_of_the_residuals_that_were_counted(histograms: str) -> None:
    memory, state = _streamed(histograms=histograms)
    assert memory._residuals is not None
    counts = (
        [state[name].flatten(0, 1).double() for name in ("residual.key_counts", "residual.value_counts")]
        if (histograms == "independent")
        else [state["residual.joint_counts"].flatten(0, 1).sum(axis).double() for axis in (4, 3)]
    )
    found = variances(memory._residuals, torch.arange(4))
    for head in range(4):
        for k in range(found.shape[1]):
            expected = 0.0
            for count, name in zip(counts, ("codebook.keys", "codebook.values"), strict=True):
                for g in range(2):
                    times = count[head, k, g].long()
                    drawn = state[name].flatten(0, 1)[head, g].double().repeat_interleave(times, 0)
                    expected += float(drawn.var(0, unbiased=False).sum()) if len(drawn) else 0.0
            assert float(found[head, k]) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert (found > 0).any()


def _streamed(*, reads: int = 1, **changes: object) -> tuple[ProtoKV, dict[str, Tensor]]:
    """Return a memory after a stream whose context was read every `reads` steps, and its state."""
    shape = shape_of(heads=2, components=3)
    world = World(shape, 6)
    memory = ProtoKV(_config(**changes), shape, world.rotary)
    memory.start(*world.sink())
    for index in range(18):
        memory.append(world.step(index, 4 + index % 3))
        if index % reads == 0:
            memory.context()
    return memory, copy_of(memory)


def _config(**changes: object) -> MemoryConfig:
    return small_config(**{"budget": 53, "pseudo_tokens": 4, "allocation": "variance"} | changes)


@pytest.mark.parametrize("histograms", ["independent", "joint"])
def test_a_context_is_a_function_of_the_state(histograms: str) -> None:
    often, state = _streamed(histograms=histograms)
    never, _ = _streamed(histograms=histograms, reads=100)
    shape = shape_of(heads=2, components=3)
    loaded = ProtoKV(_config(histograms=histograms), shape, World(shape, 0).rotary)
    loaded.load(state)
    contexts = [memory.context() for memory in (often, never, loaded)]
    assert len(set(often._layout.counts.flatten().tolist())) > 2
    for other in contexts[1:]:
        for name in ("keys", "values", "bias"):
            assert torch.equal(getattr(contexts[0], name), getattr(other, name)), name


def test_the_bias_and_the_position_of_a_slot_are_those_of_its_owner() -> None:
    memory, state = _streamed(mass_bias="log_n_over_s")
    context, counts = memory.context(), memory._layout.counts
    assert context.positions is not None
    positions = context.positions()[:, :, context.far].flatten(0, 1)
    bias = context.bias[:, :, context.far].flatten(0, 1)
    mass, anchors = state["bank.mass"].flatten(0, 1), state["bank.position"].flatten(0, 1)
    for head in range(4):
        owner = torch.arange(counts.shape[1]).repeat_interleave(counts[head])
        n = len(owner)
        share = (mass[head] / counts[head].clamp(min=1)).log()[owner].float()
        torch.testing.assert_close(bias[head, :n], share, **near(share, 3, 6.0))
        assert torch.equal(positions[head, :n], anchors[head].long()[owner])
        assert (bias[head, n:] == -torch.inf).all()
        # The slots of a prototype weigh its mass together, however many they are.
        whole = mass[head].sum().float()
        torch.testing.assert_close(bias[head].exp().sum(), whole, **near(whole, n + 3, 6.0 * float(whole)))


def test_a_variance_of_residuals_that_are_not_kept_is_refused() -> None:
    with pytest.raises(ConfigError, match="allocation"):
        PaperConfig(allocation="variance", residual=False)
