"""Ageing, merging and recycling, each alone."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from protokv.config import PaperConfig
from protokv.memory.protokv.bank import PrototypeBank, Seen
from protokv.memory.protokv.policies import merging
from protokv.memory.protokv.policies.maintenance import Recycler, decay_, recycle_
from protokv.memory.protokv.policies.merging import merge_
from protokv.memory.protokv.policy import FarTokens
from tests.memory.streams import shape_of


class Followed:
    """A follower that writes down what it is told."""

    def __init__(self) -> None:
        self.freed: list[int] = []
        self.merged: list[tuple[int, int]] = []

    def freed_(self, rows: Tensor) -> None:
        self.freed += rows.tolist()

    def merged_(self, into: Tensor, gone: Tensor) -> None:
        self.merged += list(zip(into.tolist(), gone.tolist(), strict=True))


def bank_of(keys: Tensor, *, layers: int = 1, heads: int = 1) -> PrototypeBank:
    """A bank whose prototypes have these key centres `[L * H, K, D]`, values of 0 and mass 1, seen at step 0."""
    B, K, D = keys.shape
    bank = PrototypeBank(shape_of(layers=layers, heads=heads, size=D), K)
    seen = Seen(torch.rand(B * K, 2), torch.arange(B * K, dtype=torch.float64)[:, None])
    bank.open_(torch.arange(B * K), keys.reshape(-1, D), torch.zeros(B * K, D), seen, 0)
    bank.absorbed += 10**12
    return bank


@pytest.mark.parametrize("rate", [0.05, 0.1, 0.3, 0.001, 1.0, 0.0])
def test_idle_mass_decays_by_the_exact_floor(rate: float) -> None:
    masses = torch.cat((torch.arange(1, 2001), torch.tensor([10**6, 2**24]))).float()
    bank = bank_of(torch.randn(1, len(masses), 4))
    bank.mass = masses.view(1, 1, -1).clone()
    decay_(bank, [], step=121, config=PaperConfig(decay_rate=rate))
    kept = 1 - Fraction(str(rate))
    assert bank.mass.view(-1).tolist() == [math.floor(kept * int(mass)) for mass in masses.tolist()]


def test_a_prototype_ages_only_after_more_than_t_idle_steps_and_mass_one_dies_at_once() -> None:
    bank, follower = bank_of(torch.randn(1, 3, 4)), Followed()
    bank.last_step[0, 0, 1] = 1
    decay_(bank, [follower], step=121, config=PaperConfig())
    assert (bank.mass > 0).tolist() == [[[False, True, False]]]
    assert follower.freed == [0, 2]
    assert int(bank.expired) == 2
    bank.check(bank.held(), None)


def test_once_an_interval_a_prototype_decays_in_the_first_step_behind_each_and_in_no_other() -> None:
    bank, config = bank_of(torch.randn(1, 1, 4)), PaperConfig(decay="interval", idle_steps=7, decay_rate=0.5)
    bank.mass += 99
    masses = {}
    for step in range(1, 30):
        decay_(bank, [], step, config)
        masses[step] = int(bank.mass)
    expected = {step: math.floor(100 / 2 ** max(0, (step - 1) // 7)) for step in masses}
    assert masses == expected
    assert [masses[step] for step in (7, 8, 14, 15, 22, 29)] == [100, 50, 50, 25, 12, 6]


def test_with_no_idle_time_both_readings_of_decay_are_one() -> None:
    for decay in ("floor", "interval"):
        bank = bank_of(torch.randn(1, 1, 4))
        bank.mass += 99
        for step in range(4):
            decay_(bank, [], step, PaperConfig(decay=decay, idle_steps=0, decay_rate=0.5))
        assert int(bank.mass) == 12


def test_merging_conserves_mass_and_moments() -> None:
    torch.manual_seed(3)
    keys = torch.randn(1, 1, 12).expand(1, 5, 12) + 0.01 * torch.randn(1, 5, 12)
    bank, follower = bank_of(keys), Followed()
    bank.mass[0, 0] = torch.tensor([3.0, 1, 4, 1, 5])
    weight = bank.mass.view(-1, 1)
    center, mean = (bank.key_center.view(5, -1) * weight).sum(0) / 14, (bank.mean.view(5, 2) * weight).sum(0) / 14
    second = (bank.mean.view(5, 2, 1) * bank.mean.view(5, 1, 2) + bank.covariance.view(5, 2, 2)) * weight[..., None]
    merge_(bank, [follower], PaperConfig())
    assert bank.mass.view(-1).tolist() == [14.0, 0, 0, 0, 0]
    assert follower.merged == [(0, 1), (0, 2), (0, 3), (0, 4)]
    torch.testing.assert_close(bank.key_center[0, 0, 0], center)
    torch.testing.assert_close(bank.mean[0, 0, 0], mean)
    torch.testing.assert_close(bank.covariance[0, 0, 0] + torch.outer(mean, mean), second.sum(0) / 14)
    assert float(bank.position[0, 0, 0]) == 4.0
    bank.check(bank.held(), None)


def test_merges_follow_the_order_of_pairs_and_use_the_centre_as_it_is_then() -> None:
    # On a line with eps 1: 0 takes 1 (and moves to 0.45), which brings nothing else near; 2 and 3 are then a
    # pair.
    keys = torch.tensor([0.0, 0.9, 1.6, 2.5]).view(1, 4, 1).repeat(1, 1, 4)
    bank, follower = bank_of(keys), Followed()
    config = PaperConfig(merge_key_distance=1.0)
    merge_(bank, [follower], config)
    assert follower.merged == [(0, 1), (2, 3)]
    # A centre that moved is looked at again: 0.45 and 2.05 are too far apart, until one of them comes closer.
    merge_(bank, [follower], config)
    assert len(follower.merged) == 2
    bank.key_center[0, 0, 2] = 1.3
    bank.touch_(torch.tensor([2]))
    merge_(bank, [follower], config)
    assert follower.merged[2:] == [(0, 2)]


def test_close_keys_with_different_values_stay_apart() -> None:
    bank = bank_of(torch.ones(1, 3, 8))
    bank.value_center[0, 0, 1] = 0.26
    merge_(bank, [], PaperConfig())
    assert bank.mass.view(-1).tolist() == [2.0, 1.0, 0.0]


def test_heads_merge_independently_of_each_other() -> None:
    torch.manual_seed(0)
    keys = 0.4 * torch.randn(6, 9, 8)
    together = bank_of(keys, layers=2, heads=3)
    merge_(together, [], PaperConfig(merge_key_distance=0.5))
    for head in range(6):
        alone = bank_of(keys[head : head + 1])
        merge_(alone, [], PaperConfig(merge_key_distance=0.5))
        assert torch.equal(together.key_center.flatten(0, 1)[head], alone.key_center[0, 0])
    assert 0 < int(together.merged.sum()) < 6 * 8


def _loop_over_pairs(keys: Tensor, values: Tensor, mass: Tensor, config: PaperConfig) -> list[tuple[int, int]]:
    """The merges of Algorithm 2 in one head, written out; centres `[K, D]` and masses `[K]` are changed."""
    merged = []
    for i in range(len(mass)):
        for j in range(i + 1, len(mass)):
            if mass[i] == 0 or mass[j] == 0:
                continue
            near = (keys[i] - keys[j]).square().mean() < config.merge_key_distance**2
            if near and (values[i] - values[j]).square().mean() < config.merge_value_distance**2:
                for center in (keys, values):
                    center[i] = (mass[i] * center[i] + mass[j] * center[j]) / (mass[i] + mass[j])
                    center[j] = 0.0
                mass[i] += mass[j]
                mass[j] = 0.0
                merged.append((i, j))
    return merged


@given(
    seed=st.integers(0, 2**16),
    heads=st.integers(1, 3),
    prototypes=st.integers(2, 40),
    size=st.sampled_from([2, 4, 12]),
    things=st.sampled_from([1, 3, 20]),
    noise=st.sampled_from([0.02, 0.15, 0.3]),
    heavy=st.booleans(),
    width=st.sampled_from([1, 3, 32]),
    components=st.sampled_from([1, 32]),
    few=st.sampled_from([1, 16]),
)
def test_merging_side_by_side_is_the_loop_over_pairs(
    seed: int,
    heads: int,
    prototypes: int,
    size: int,
    things: int,
    noise: float,
    heavy: bool,
    width: int,
    components: int,
    few: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(heads, things, size, generator=generator)
    which = torch.randint(things, (heads, prototypes), generator=generator)
    bank = bank_of(
        centers.gather(1, which[..., None].expand(-1, -1, size))
        + noise * torch.randn(heads, prototypes, size, generator=generator),
        heads=heads,
    )
    bank.value_center.copy_(0.5 * noise * torch.randn(bank.value_center.shape, generator=generator))
    # Masses that differ by orders of magnitude make centres jump, farther than the first plan allows for.
    bank.mass.copy_(10.0 ** (torch.randint(4, bank.mass.shape, generator=generator) if heavy else 0))
    config = PaperConfig()
    for _ in range(2):
        follower = Followed()
        expected, held = [], [part[0].clone() for part in (bank.key_center, bank.value_center, bank.mass)]
        for head in range(heads):
            pairs = _loop_over_pairs(*(part[head] for part in held), config)
            expected += [(head * prototypes + i, head * prototypes + j) for i, j in pairs]
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (("_WIDTH", width), ("_COMPONENTS", components), ("_FEW", few)):
                patch.setattr(merging, name, value)
            merge_(bank, [follower], config)
        assert sorted(follower.merged) == expected
        for found, part in zip((bank.key_center, bank.value_center, bank.mass), held, strict=True):
            torch.testing.assert_close(found[0], part, rtol=1e-5, atol=1e-6)
        # A second pass over what some of has moved meanwhile: the pairs that were found apart are not looked at again.
        rows = (
            ((torch.rand(bank.mass.shape, generator=generator) < 0.3) & (bank.mass > 0)).view(-1).nonzero().squeeze(1)
        )
        bank.key_center.view(-1, size)[rows] += 0.1
        bank.touch_(rows)


def test_a_centre_that_jumps_is_followed_as_far_as_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a line with eps 1: the light 0 goes to where the heavy 1 is, from there to 2 and so to 3, each out of reach of
    # where it began.
    keys = torch.tensor([0.0, 0.99, 1.95, 2.9]).view(1, 4, 1).repeat(1, 1, 4)
    bank, follower = bank_of(keys), Followed()
    bank.mass[0, 0] = torch.tensor([1.0, 1e3, 1e6, 1e9])
    plans = []

    def counted(bank: PrototypeBank, pairs: Tensor, reach: float, config: PaperConfig) -> object:
        plans.append(reach)
        return plan(bank, pairs, reach, config)

    plan = merging._plan
    monkeypatch.setattr(merging, "_plan", counted)
    merge_(bank, [follower], PaperConfig(merge_key_distance=1.0))
    assert follower.merged == [(0, 1), (0, 2), (0, 3)]
    assert plans == [1.5, 3.0, 6.0]


def _newest(tokens: int, heads: int) -> FarTokens:
    keys = torch.arange(heads * tokens * 4.0).view(heads, tokens, 4)
    return FarTokens(keys, -keys, Seen(torch.rand(tokens, 2), torch.arange(tokens, dtype=torch.float64)[:, None]))


@pytest.mark.parametrize(("tokens", "reopened"), [(5, 3), (2, 2), (0, 0)])
def test_freed_slots_are_opened_with_distinct_tokens_of_the_newest_step(tokens: int, reopened: int) -> None:
    bank = bank_of(torch.randn(2, 6, 4) + 1000, heads=2)
    bank.free_(torch.tensor([1, 2, 5, 9]))
    bank.last_step[0, 0, 0], bank.mass[0, 0, 0] = -1, 0.0
    recycle_(bank, Recycler(lambda: _newest(tokens, 2), seed=4), step=7)
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
        recycle_(bank, Recycler(lambda: _newest(9, 1), seed), step=step)
        return bank.key_center

    assert torch.equal(centers(1, 1), centers(1, 1))
    assert not torch.equal(centers(1, 1), centers(2, 1))
    assert not torch.equal(centers(1, 1), centers(1, 2))


def test_some_layers_of_a_model_draw_what_the_whole_draws_for_them() -> None:
    whole = Recycler(lambda: _newest(9, 1), seed=3).draw(5, 7, 2, 11)
    part = Recycler(lambda: _newest(9, 1), seed=3, of_model=(7, slice(2, 5))).draw(5, 3, 2, 11)
    assert torch.equal(part, whole[2:5])
