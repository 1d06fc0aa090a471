"""A small tower, a small bank of clips and its composer, shared by the tests of training."""

from __future__ import annotations

import pytest
import torch

from samples.training.bank import build_bank
from samples.training.clips import DENSE, EMPTY, OVERLAPPING, SIMULTANEOUS, SINGLE
from samples.training.compose import Composer
from samples.training.model import make_model
from tests.training.helpers import SMALL

COUNTS = {SINGLE: 400, OVERLAPPING: 21, SIMULTANEOUS: 13, EMPTY: 101, DENSE: 50}


def project(tower, patches):
    """Project the patches of each cell at random; the tower would take most of the time of these tests."""
    cells = patches.float().view(len(patches) // 36, 9, -1)
    matrix = torch.randn(cells.shape[-1], 128, generator=torch.Generator().manual_seed(0))
    return (cells @ matrix / cells.shape[-1] ** 0.5).bfloat16()


@pytest.fixture(scope="session")
def visual():
    return make_model(3, **SMALL).model.visual.state_dict()


@pytest.fixture(scope="session")
def bank(visual):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("samples.training.bank.encode_steps", project)
        return build_bank(visual, seed=1, counts=COUNTS, processes=1, **SMALL)


@pytest.fixture(scope="session")
def composer(bank):
    return Composer(bank)
