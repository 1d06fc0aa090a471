"""Ageing alone; merging and recycling are compared with the oracle in `test_oracle`."""

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from protokv.core.bank import FarTokens, PrototypeBank
from protokv.memories import PaperConfig
from protokv.memories.paper.rule import decay_
from tests.core.streams import shape_of


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
