"""The bank of clips says what it holds."""

from __future__ import annotations

import numpy as np
import torch

from samples.training.bank import Bank
from samples.training.clips import EMPTY
from tests.training.conftest import COUNTS


def test_the_bank_is_consistent_and_comes_back_from_its_tensors(bank):
    assert len(bank.length) == sum(COUNTS.values())
    assert len(bank.features) == len(bank.lit) == bank.length.sum()
    for clip in range(0, len(bank.length), 7):
        events = bank.events[bank.event_of[clip] : bank.event_of[clip + 1]]
        lit = bank.lit[bank.first[clip] : bank.first[clip] + bank.length[clip]]
        assert lit.any() == (bank.kind[clip] != EMPTY)
        for _, _, place, begin, end in events:
            assert lit[begin:end, place].all()
    again = Bank.from_tensors(bank.tensors())
    assert torch.equal(again.features, bank.features)
    np.testing.assert_array_equal(again.events, bank.events)
