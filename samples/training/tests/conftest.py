"""A small tower, a small bank of clips and its composer, shared by the tests of training."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from samples.training.bank import build_bank
from samples.training.clips import DENSE, EMPTY, OVERLAPPING, SIMULTANEOUS, SINGLE
from samples.training.compose import Composer
from samples.training.model import make_model
from samples.training.tests.helpers import SMALL

COUNTS = {SINGLE: 1500, OVERLAPPING: 21, SIMULTANEOUS: 13, EMPTY: 101, DENSE: 50}


@pytest.fixture(scope="session")
def visual():
    return make_model(3, **SMALL).model.visual.state_dict()


@pytest.fixture(scope="session")
def bank(visual):
    """Return clips with events of the world and random features; rendering and encoding would take
    most of the time.
    """
    generator = torch.Generator().manual_seed(0)
    model = make_model(0, **SMALL)

    def draw_features(visual, frames):
        return torch.randn(len(frames), 9, 128, generator=generator).bfloat16()

    with pytest.MonkeyPatch.context() as patch:
        for name, replacement in {
            "clips._render": lambda rng, sceneries, events: np.zeros((len(sceneries), 2), np.uint8),
            "bank.make_model": lambda *_, **__: model,
            "bank.to_patches": lambda frames, dtype: frames,
            "bank.encode_steps": draw_features,
        }.items():
            patch.setattr(f"samples.training.{name}", replacement)
        return build_bank(visual, seed=1, counts=COUNTS, processes=1, **SMALL)


@pytest.fixture(scope="session")
def composer(bank):
    return Composer(bank)
