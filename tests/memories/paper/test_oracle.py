"""The fast memory equals `naive`, Algorithms 1-4 written out, token for token.

Assignments, masses, histograms and counters are compared exactly; centres and spatial statistics
within what leaves room for a different order of adding and for nothing else. Three things are ties
to float32 and no error: a token whose two best costs differ by less than that ends the comparison
there, codewords that do are one, and residuals that do are fitted by one codebook.
"""

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import event, example, given
from hypothesis import strategies as st
from torch import Tensor

from protokv.core.build import build_memory
from protokv.core.step import StepKV
from protokv.core.tensors import MemoryShape
from protokv.memories import PaperConfig
from protokv.memories.paper import assignment, maintenance
from protokv.memories.paper import residuals as quantizer
from protokv.memories.paper.bank import PaperBank
from protokv.memories.paper.memory import PaperPrototypeMemory
from protokv.texts import Keywords
from tests.core.streams import World, shape_of, slots_of, small_config
from tests.oracles.paper import Head, NaiveProtoKV, Prototype
from tests.tolerance import check_near, tolerance

# The numbers of a key, and the tokens of a stream, each of which may have moved a centre.
TERMS = 16 + 30 * 24
# Costs are cosines and what is added to them.
TIE = tolerance(torch.float32, TERMS)
# A codeword is a mean of residuals: each of them is as far off as the centre that it was taken
# against.
ALIKE = tolerance(torch.float32, TERMS, 8.0)


# Samples of codebooks that this comparison fitted, and these.
_fits = list[tuple[Tensor, Tensor]]()


@pytest.fixture(autouse=True, scope="module")
def _residuals_that_are_alike_have_one_codebook() -> Iterator[None]:
    """A residual half-way between two codewords may go to either one in a fit, and all later passes
    follow it.
    """
    fit_codebook = quantizer.fit_codebook

    def fit(samples: Tensor, G: int, C: int) -> Tensor:
        for others, codebook in _fits:
            if others.shape == samples.shape and (others - samples).abs().max() < ALIKE:
                return codebook
        _fits.append((samples.clone(), fit_codebook(samples, G, C)))
        return _fits[-1][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantizer, "fit_codebook", fit)
        yield


def _configure(changes: Keywords) -> PaperConfig:
    return small_config(**changes)


def configs() -> st.SearchStrategy[PaperConfig]:
    """Every variant of the paper's ablations and sensitivity tables, and every constant."""
    return st.fixed_dictionaries(
        {
            "budget": st.integers(19, 45),
            "pseudo_tokens": st.sampled_from([1, 2, 3, 4, 8, 16]),
            "split": st.sampled_from([(1, 3), (1, 5), (1, 2), (3, 1), (1, 1), (0, 1), (1, 0)]),
            "subquantizers": st.sampled_from([1, 2, 4]),
            "codewords": st.sampled_from([2, 5]),
            "warmup_residuals": st.sampled_from([17, 40]),
            "idle_steps": st.sampled_from([0, 1, 4, 30]),
            "spatial_weight": st.sampled_from([0.1, 0.0, 1.5]),
            "idle_weight": st.sampled_from([0.01, 0.0, 0.7]),
            "key_rate": st.sampled_from([0.05, 0.3, 0.9]),
            "value_rate": st.sampled_from([0.05, 0.3]),
            "spatial_rate": st.sampled_from([0.05, 0.3]),
            "anchor": st.sampled_from(["recent", "first", "average"]),
            "decay": st.sampled_from(["floor", "interval", "off"]),
            "decay_rate": st.sampled_from([0.05, 0.3]),
            "merge": st.booleans(),
            "merge_key_distance": st.sampled_from([0.5, 0.2, 1.0]),
            "merge_value_distance": st.sampled_from([0.5, 0.25, 1.0]),
            "recycle": st.booleans(),
            "residual": st.sampled_from([True, True, False]),
            "mass_bias": st.sampled_from(["log_n", "log_n_over_s", "off"]),
            "seed": st.integers(0, 99),
        }
    ).map(_configure)


@given(
    config=configs(),
    shape=st.builds(
        shape_of,
        layers=st.integers(1, 2),
        heads=st.integers(1, 3),
        size=st.sampled_from([8, 12, 16]),
        components=st.sampled_from([1, 3]),
    ),
    seed=st.integers(0, 2**16),
    lengths=st.lists(st.integers(1, 7) | st.just(24), min_size=8, max_size=20),
    things=st.sampled_from([2, 12]),
    noise=st.sampled_from([0.05, 0.3, 1.0]),
    block=st.sampled_from([200, 2**24]),
)
# a residual half-way between two codewords of the fit
@example(
    config=small_config(
        budget=40,
        split=(0, 1),
        idle_steps=2,
        merge=False,
        key_rate=0.9,
        spatial_rate=0.45,
    ),
    shape=shape_of(layers=1, heads=2),
    seed=460,
    lengths=[20, 24, 3, 21],
    things=2,
    noise=0.3,
    block=2**24,
)
def test_the_fast_memory_equals_the_algorithms_written_out(
    config: PaperConfig,
    shape: MemoryShape,
    seed: int,
    lengths: list[int],
    things: int,
    noise: float,
    block: int,
) -> None:
    fast, naive, world = both(config, shape, seed, noise=noise, things=things)
    with pytest.MonkeyPatch.context() as patch:
        # Costs that are held at once.
        patch.setattr(assignment, "_BLOCK_ELEMENTS", block)
        for index in watched_by_both(fast, naive, world, lengths):
            if index % 3 == 0 or index == len(lengths) - 1:
                compare_state(fast, naive)
                compare_context(fast, naive)


def both(
    config: PaperConfig, shape: MemoryShape, seed: int, **how: Any
) -> tuple[PaperPrototypeMemory, NaiveProtoKV, World]:
    """Start the fast memory and the oracle; return them and the world that both will watch."""
    _fits.clear()
    world = World(shape, seed, **how)
    fast = build_memory(config, shape, world.rotary)
    assert isinstance(fast, PaperPrototypeMemory)
    fast.start(*world.sink())
    return fast, NaiveProtoKV(config, shape, world.rotary), world


def watched_by_both(
    fast: PaperPrototypeMemory, naive: NaiveProtoKV, world: World, lengths: list[int]
) -> Iterator[int]:
    """The number of each step behind which the two may be compared: a near-tie ends it."""
    for index, tokens in enumerate(lengths):
        step = world.step(index, tokens)
        fast.append(step)
        naive.append(step)
        if min(margin for head in flat(naive) for _, margin in [*head.decisions, (0, 1.0)]) < TIE:
            event("a near-tie ended the comparison")
            return
        yield index


def flat(naive: NaiveProtoKV) -> list[Head]:
    return [head for layer in naive.heads for head in layer]


def compare_state(fast: PaperPrototypeMemory, naive: NaiveProtoKV) -> None:
    state = fast.tensors()

    def rows(name: str) -> Tensor:
        return state[name].flatten(0, 1)

    for h, head in enumerate(flat(naive)):
        alive = [prototype is not None for prototype in head.slots]
        assert (rows("bank.mass")[h] > 0).tolist() == alive
        assert (rows("bank.last_step")[h] >= 0).tolist() == [
            slot in head.used for slot in range(len(alive))
        ]
        held = [
            (slot, prototype) for slot, prototype in enumerate(head.slots) if prototype is not None
        ]
        if not held:
            continue
        slots = torch.tensor([slot for slot, _ in held])

        def stacked(name: str, held: list[tuple[int, Prototype]] = held) -> Tensor:
            return torch.stack([getattr(prototype, name) for _, prototype in held])

        for found, name in zip(
            fast._bank.centers(h * len(alive) + slots), ("key_center", "value_center"), strict=True
        ):
            check_near(found, stacked(name), TERMS)
        for name in ("mean", "covariance", "position"):
            check_near(rows(f"bank.{name}")[h, slots], stacked(name), TERMS)
        for slot, prototype in held:
            assert float(rows("bank.mass")[h, slot]) == prototype.mass
            assert int(rows("bank.last_step")[h, slot]) == prototype.last_step
            if not naive.config.residual:
                continue
            assert int(rows("residual.updates")[h, slot]) == prototype.updates
            assert bool(rows("codebook.fitted")[h]) == (head.key_codebook is not None)
            if head.key_codebook is None or head.value_codebook is None:
                continue
            keys, values = (
                first_alike(codebook) for codebook in (head.key_codebook, head.value_codebook)
            )
            for name, codebook in (("keys", head.key_codebook), ("values", head.value_codebook)):
                assert torch.equal(rows(f"codebook.{name}")[h], codebook)
            counted = [
                ("key", prototype.key_counts, keys),
                ("value", prototype.value_counts, values),
            ]
            for name, expected, alike in counted:
                found = rows(f"residual.{name}_counts")[h, slot]
                assert torch.equal(added_up(found, alike), added_up(expected, alike))


def added_up(counts: Tensor, alike: Tensor) -> Tensor:
    """Counts `[G, C]` with those of codewords that are one up to rounding added to the first of
    them.
    """
    flat = counts.flatten(1).long()
    return torch.zeros_like(flat).scatter_add_(1, alike, flat)


def first_alike(codebook: Tensor) -> Tensor:
    alike = (codebook[:, :, None] - codebook[:, None]).abs().amax(3) < ALIKE
    return alike.to(torch.uint8).argmax(2)


def compare_context(fast: PaperPrototypeMemory, naive: NaiveProtoKV) -> None:
    context = slots_of(fast)
    keys, values, bias = (
        part[:, :, context.far].flatten(0, 1)
        for part in (context.keys, context.values, context.bias)
    )
    positions = context.positions()[:, :, context.far].flatten(0, 1)
    for h, head in enumerate(flat(naive)):
        shown = torch.full_like(bias[h], -torch.inf)
        codebooks = [book for book in (head.key_codebook, head.value_codebook) if book is not None]
        doubled = any(
            (first_alike(book) != torch.arange(book.shape[1])).any() for book in codebooks
        )
        for slot, pairs, mass_bias in naive.pseudo_tokens(*divmod(h, naive.shape.kv_heads)):
            start = slot * len(pairs)
            shown[start : start + len(pairs)] = mass_bias
            prototype = head.slots[slot]
            assert prototype is not None
            position = prototype.position
            if ((position % 1 - 0.5).abs() < 1e-3).any():
                event("a mean position half-way between two: not compared")
                continue
            assert (positions[h, start : start + len(pairs)] == position.round().long()).all()
            if doubled:
                event("codewords that are one to float32: pseudo-tokens not compared")
                continue
            for found, expected in zip(
                (keys, values), map(torch.stack, zip(*pairs, strict=True)), strict=True
            ):
                # A centre, a codeword and the angle of where they are shown.
                torch.testing.assert_close(
                    found[h, start : start + len(pairs)], expected, rtol=0, atol=2 * ALIKE
                )
        # A quotient of masses up to a few hundred, and its logarithm, which is off by up to two
        # roundings.
        check_near(bias[h], shown, 3, 6.0)


@pytest.mark.parametrize("components", [1, 3])
def test_a_long_stream_goes_through_everything_and_stays_equal(components: int) -> None:
    shape = shape_of(layers=1, heads=3, size=12, components=components)
    fast, naive, world = both(small_config(budget=45, idle_steps=3, warmup_residuals=60), shape, 5)
    lengths = [1 + index * 5 % 7 for index in range(50)]
    assert list(watched_by_both(fast, naive, world, lengths)) == list(range(50))
    compare_state(fast, naive)
    compare_context(fast, naive)
    state = fast.tensors()
    for counter in ("opened", "absorbed", "merged", "expired", "recycled"):
        assert (state[f"bank.{counter}"] > 0).all(), counter
    assert state["codebook.fitted"].all()
    assert "warmup.keys" not in state


@pytest.mark.parametrize(("noise", "spread"), [(0.02, 1.0), (0.05, 0.2), (0.2, 0.25)])
def test_a_scene_that_stands_still_is_merged_as_the_algorithm_written_out_does(
    noise: float, spread: float
) -> None:
    # The same tokens step after step: what is opened is merged at once, in many groups of two and
    # in larger ones.
    shape = shape_of(layers=1, heads=1, size=12)
    config = small_config(
        budget=90, pseudo_tokens=1, merge_key_distance=0.4, merge_value_distance=0.4, seed=3
    )
    fast, naive, world = both(config, shape, 8, noise=spread)
    still = world.step(0, 23)
    generator = torch.Generator().manual_seed(1)
    for index in range(14):
        keys, values = (
            part + noise * torch.randn(part.shape, generator=generator)
            for part in (still.keys, still.values)
        )
        step = StepKV(keys, values, still.positions, still.coordinates, index)
        fast.append(step)
        naive.append(step)
        assert (
            min(margin for head in flat(naive) for _, margin in [*head.decisions, (0, 1.0)]) > TIE
        )
        compare_state(fast, naive)
    assert (fast.tensors()["bank.merged"] > 100).all()


@pytest.mark.parametrize("rate", [0.05, 0.1, 0.3, 0.001, 1.0, 0.0])
def test_idle_mass_decays_by_the_exact_floor(rate: float) -> None:
    masses = torch.tensor([*range(1, 2001), 10**6, 2**24])
    bank = PaperBank(shape_of(layers=1), len(masses))
    bank.mass[0, 0] = masses
    maintenance.decay_masses_(bank, None, step=121, config=PaperConfig(decay_rate=rate))
    kept = 1 - Fraction(str(rate))
    assert bank.mass[0, 0].tolist() == [math.floor(kept * mass) for mass in masses.tolist()]
