"""Ageing and merging, each alone; recycling is compared with the oracle in `test_oracle`."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from protokv.core.bank import FarTokens, PrototypeBank
from protokv.memories import PaperConfig
from protokv.memories.paper.rule import Anchor, decay_, merge_close_
from tests.core.streams import World, shape_of
from tests.oracles.invariants import check_bank
from tests.oracles.paper import NaiveProtoKV, Prototype
from tests.tolerance import near


class Listener:
    """Stands for residuals and writes down what it is told."""

    def __init__(self) -> None:
        self.merged: list[tuple[int, int]] = []

    def merged_(self, into: Tensor, gone: Tensor) -> None:
        self.merged += sorted(zip(into.tolist(), gone.tolist(), strict=True))


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
    size=st.tuples(st.integers(1, 3), st.integers(2, 40), st.sampled_from([2, 4, 12, 64])),
    things=st.sampled_from([1, 3, 20]),
    noise=st.sampled_from([0.02, 0.15, 0.3]),
    line=st.booleans(),
    heavy=st.booleans(),
    anchor=st.sampled_from(["recent", "first", "average"]),
)
def test_merging_side_by_side_is_what_is_written_out(
    seed: int, size: tuple[int, int, int], things: int, noise: float, line: bool, heavy: bool, anchor: Anchor
) -> None:
    heads, prototypes, D = size
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    which = torch.randint(things, (heads, prototypes), generator=generator)
    keys = normal(heads, things, D).gather(1, which[..., None].expand(-1, -1, D))
    if line:
        # Each close to those beside it.
        keys = normal(heads, 1, D) * torch.arange(prototypes)[:, None] * 0.1
    bank = bank_of(keys + noise * normal(heads, prototypes, D), heads=heads)
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
        bank.key_center.view(-1, D)[rows] += 0.1
        moved.view(-1)[rows] = True
