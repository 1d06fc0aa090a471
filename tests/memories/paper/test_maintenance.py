"""Ageing, merging and recycling, each alone."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from protokv.core.bank import FarTokens, PrototypeBank
from protokv.memories import PaperConfig
from protokv.memories.paper.rule import Anchor, decay_, draw, merge_close_, merge_order, recycle_
from tests.core.streams import World, shape_of
from tests.oracles.invariants import check_bank
from tests.oracles.paper import NaiveProtoKV, Prototype
from tests.tolerance import near


class Listener:
    """A listener that writes down what it is told."""

    def __init__(self) -> None:
        self.freed: list[int] = []
        self.merged: list[tuple[int, int]] = []

    def freed_(self, rows: Tensor) -> None:
        self.freed += rows.tolist()

    def merged_(self, into: Tensor, gone: Tensor) -> None:
        self.merged += sorted(zip(into.tolist(), gone.tolist(), strict=True))


def merge_all_(bank: PrototypeBank, listener: Listener | None, config: PaperConfig) -> Tensor:
    """Merge as if all prototypes had moved; return those that are searched again, `[L * H, K]` bool."""
    moved = torch.ones_like(bank.mass, dtype=torch.bool).flatten(0, 1)
    merge_close_(bank, moved, listener, config)
    return moved


def bank_of(keys: Tensor, *, layers: int = 1, heads: int = 1) -> PrototypeBank:
    """A bank whose prototypes have these key centres `[L * H, K, D]`, values of 0 and mass 1, seen at step 0."""
    B, K, D = keys.shape
    bank = PrototypeBank(shape_of(layers=layers, heads=heads, size=D), K)
    seen = torch.rand(B * K, 2), torch.arange(B * K, dtype=torch.float64)[:, None]
    tokens = FarTokens(keys.reshape(1, -1, D), torch.zeros(1, B * K, D), *seen, torch.ones(B * K, dtype=torch.int64))
    bank.open_(torch.arange(B * K), tokens, 0, torch.arange(B * K), 0)
    bank.absorbed += 10**12
    return bank


@pytest.mark.parametrize("rate", [0.05, 0.1, 0.3, 0.001, 1.0, 0.0])
def test_idle_mass_decays_by_the_exact_floor(rate: float) -> None:
    masses = torch.cat((torch.arange(1, 2001), torch.tensor([10**6, 2**24]))).float()
    bank = bank_of(torch.randn(1, len(masses), 4))
    bank.mass = masses.view(1, 1, -1).clone()
    decay_(bank, None, step=121, config=PaperConfig(decay_rate=rate))
    kept = 1 - Fraction(str(rate))
    assert bank.mass.view(-1).tolist() == [math.floor(kept * int(mass)) for mass in masses.tolist()]


def test_a_prototype_ages_only_after_more_than_t_idle_steps_and_mass_one_dies_at_once() -> None:
    bank, listener = bank_of(torch.randn(1, 3, 4)), Listener()
    bank.last_step[0, 0, 1] = 1
    decay_(bank, listener, step=121, config=PaperConfig())
    assert (bank.mass > 0).tolist() == [[[False, True, False]]]
    assert listener.freed == [0, 2]
    assert int(bank.expired) == 2
    check_bank(bank.live_tensors())


def test_once_an_interval_a_prototype_decays_in_the_first_step_behind_each_and_in_no_other() -> None:
    bank, config = bank_of(torch.randn(1, 1, 4)), PaperConfig(decay="interval", idle_steps=7, decay_rate=0.5)
    bank.mass += 99
    masses = {}
    for step in range(1, 30):
        decay_(bank, None, step, config)
        masses[step] = int(bank.mass)
    expected = {step: math.floor(100 / 2 ** max(0, (step - 1) // 7)) for step in masses}
    assert masses == expected
    assert [masses[step] for step in (7, 8, 14, 15, 22, 29)] == [100, 50, 50, 25, 12, 6]


def test_with_no_idle_time_both_readings_of_decay_are_one() -> None:
    for decay in ("floor", "interval"):
        bank = bank_of(torch.randn(1, 1, 4))
        bank.mass += 99
        for step in range(4):
            decay_(bank, None, step, PaperConfig(decay=decay, idle_steps=0, decay_rate=0.5))
        assert int(bank.mass) == 12


def test_merging_conserves_mass_and_moments() -> None:
    torch.manual_seed(3)
    keys = torch.randn(1, 1, 12).expand(1, 5, 12) + 0.01 * torch.randn(1, 5, 12)
    bank, listener = bank_of(keys), Listener()
    bank.mass[0, 0] = torch.tensor([3.0, 1, 4, 1, 5])
    weight = bank.mass.view(-1, 1)
    center, mean = (bank.key_center.view(5, -1) * weight).sum(0) / 14, (bank.mean.view(5, 2) * weight).sum(0) / 14
    second = (bank.mean.view(5, 2, 1) * bank.mean.view(5, 1, 2) + bank.covariance.view(5, 2, 2)) * weight[..., None]
    merge_all_(bank, listener, PaperConfig())
    one = merge_order(5)[0]
    assert bank.mass.view(-1).tolist() == [14 * (slot == one) for slot in range(5)]
    assert listener.merged == [(one, slot) for slot in range(5) if slot != one]
    second = second.sum(0) / 14
    torch.testing.assert_close(bank.key_center[0, 0, one], center, **near(center, 5 * 3))
    torch.testing.assert_close(bank.mean[0, 0, one], mean, **near(mean, 5 * 3))
    torch.testing.assert_close(bank.covariance[0, 0, one] + torch.outer(mean, mean), second, **near(second, 5 * 6))
    assert float(bank.position[0, 0, one]) == 4.0
    check_bank(bank.live_tensors())


def test_merges_follow_the_merge_order_and_use_the_centres_of_the_pass_before() -> None:
    # On a line with eps 1, in order of turns: the first takes the second (and moves to 0.45), which brings it nowhere
    # near the third; that one and the fourth are a pair.
    order = list(merge_order(4))
    keys = torch.zeros(1, 4, 4)
    keys[0, order] = torch.tensor([0.0, 0.9, 1.6, 2.5])[:, None]
    bank, listener = bank_of(keys), Listener()
    config = PaperConfig(merge_key_distance=1.0)
    moved = merge_all_(bank, listener, config)
    expected = [(order[0], order[1]), (order[2], order[3])]
    assert sorted(listener.merged) == sorted(expected)
    # A centre that moved is looked at again: 0.45 and 2.05 are too far apart, until one of them comes closer.
    merge_close_(bank, moved, listener, config)
    assert len(listener.merged) == 2
    bank.key_center[0, 0, order[2]] = 1.3
    moved[0, order[2]] = True
    merge_close_(bank, moved, listener, config)
    assert listener.merged[2:] == [(order[0], order[2])]


def heads_of(bank: PrototypeBank, config: PaperConfig) -> NaiveProtoKV:
    """The bank as the oracle has it."""
    L, H, K, D = bank.key_center.shape
    naive = NaiveProtoKV(config, shape_of(layers=L, heads=H, size=D), World(shape_of(), 0).rotary)
    names = ("key_center", "value_center", "mean", "covariance", "position")
    counts = torch.zeros(1, 1, dtype=torch.int64)
    for layer in range(L):
        for head in range(H):
            slots: list[Prototype | None] = []
            for slot in range(K):
                held = {name: getattr(bank, name)[layer, head, slot].clone() for name in names}
                mass, last = (int(part[layer, head, slot]) for part in (bank.mass, bank.last_step))
                one = Prototype(**held, mass=mass, last_step=last, key_counts=counts, value_counts=counts)
                slots.append(one if mass else None)
            naive.heads[layer][head].slots = slots
    return naive


@given(
    seed=st.integers(0, 2**16),
    heads=st.integers(1, 3),
    prototypes=st.integers(2, 40),
    size=st.sampled_from([2, 4, 12, 64]),
    things=st.sampled_from([1, 3, 20]),
    noise=st.sampled_from([0.02, 0.15, 0.3]),
    line=st.booleans(),
    heavy=st.booleans(),
    anchor=st.sampled_from(["recent", "first", "average"]),
)
def test_merging_side_by_side_is_what_is_written_out(
    seed: int,
    heads: int,
    prototypes: int,
    size: int,
    things: int,
    noise: float,
    line: bool,
    heavy: bool,
    anchor: Anchor,
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    which = torch.randint(things, (heads, prototypes), generator=generator)
    keys = normal(heads, things, size).gather(1, which[..., None].expand(-1, -1, size))
    if line:
        # Each close to those beside it.
        keys = normal(heads, 1, size) * torch.arange(prototypes)[:, None] * 0.1
    bank = bank_of(keys + noise * normal(heads, prototypes, size), heads=heads)
    bank.value_center.copy_(0.5 * noise * normal(*bank.value_center.shape))
    # Masses that differ by orders of magnitude make centres jump.
    bank.mass.copy_(10.0 ** (torch.randint(4, bank.mass.shape, generator=generator) if heavy else 0))
    config, moved = PaperConfig(anchor=anchor), torch.ones(heads, prototypes, dtype=torch.bool)
    for _ in range(3):
        naive, listener = heads_of(bank, config), Listener()
        names = ("key_center", "value_center", "mean", "covariance", "position")
        largest = {name: float(getattr(bank, name).abs().max()) for name in names}
        merge_close_(bank, moved, listener, config)
        merged = []
        for head, expected in enumerate(naive.heads[0]):
            before = list(expected.slots)
            naive._merge(expected)
            for slot, prototype in enumerate(expected.slots):
                assert int(bank.mass[0, head, slot]) == (prototype.mass if prototype else 0)
                if prototype is None:
                    heir = before[slot].merged_into if before[slot] else None
                    merged += [(head * prototypes + before.index(heir), head * prototypes + slot)] if heir else []
                    continue
                for name in names:
                    expected_part = getattr(prototype, name)
                    found = getattr(bank, name)[0, head, slot]
                    # Three passes, each of which may merge all others into one.
                    allowed = near(expected_part, 3 * 3 * prototypes, scale=largest[name])
                    torch.testing.assert_close(found, expected_part, **allowed)
        assert sorted(listener.merged) == sorted(merged)
        check_bank(bank.live_tensors())
        # Another pass over what some of has moved meanwhile: what was found apart and did not move is not looked at.
        rows = (
            ((torch.rand(bank.mass.shape, generator=generator) < 0.2) & (bank.mass > 0)).view(-1).nonzero().squeeze(1)
        )
        bank.key_center.view(-1, size)[rows] += 0.1
        moved.view(-1)[rows] = True


def _newest(tokens: int, heads: int) -> FarTokens:
    keys = torch.arange(heads * tokens * 4.0).view(heads, tokens, 4)
    places = torch.rand(tokens, 2), torch.arange(tokens, dtype=torch.float64)[:, None]
    return FarTokens(keys, -keys, *places, torch.ones(tokens, dtype=torch.int64))


@pytest.mark.parametrize(("tokens", "reopened"), [(5, 3), (2, 2), (0, 0)])
def test_freed_slots_are_opened_with_distinct_tokens_of_the_newest_step(tokens: int, reopened: int) -> None:
    bank = bank_of(torch.randn(2, 6, 4) + 1000, heads=2)
    bank.free_(torch.tensor([1, 2, 5, 9]))
    bank.last_step[0, 0, 0], bank.mass[0, 0, 0] = -1, 0.0
    recycle_(bank, lambda: _newest(tokens, 2), 4, 7, shape_of(layers=1, heads=2))
    fresh = (bank.last_step[0, 0] == 7).nonzero().squeeze(1).tolist()
    assert fresh == [1, 2, 5][:reopened]
    assert len({tuple(bank.key_center[0, 0, slot].tolist()) for slot in fresh}) == reopened
    assert int(bank.recycled[0, 0]) == reopened
    # A slot that no token ever opened waits for an evicted one.
    assert float(bank.mass[0, 0, 0]) == 0.0


def test_the_draw_for_recycling_is_a_function_of_seed_and_step() -> None:
    def centers(seed: int, step: int) -> Tensor:
        bank = bank_of(torch.randn(1, 4, 4))
        bank.free_(torch.arange(4))
        recycle_(bank, lambda: _newest(9, 1), seed, step, shape_of(layers=1))
        return bank.key_center

    assert torch.equal(centers(1, 1), centers(1, 1))
    assert not torch.equal(centers(1, 1), centers(2, 1))
    assert not torch.equal(centers(1, 1), centers(1, 2))


def test_some_layers_of_a_model_draw_what_the_whole_draws_for_them() -> None:
    whole = draw(3, 5, shape_of(layers=7, heads=2), 11)
    part = draw(3, 5, replace(shape_of(layers=3, heads=2), part_of=7, first_layer=2), 11)
    assert torch.equal(part, whole[4:10])
