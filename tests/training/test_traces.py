"""What is left behind in tokens that are not to change is counted, and padding is not."""

from __future__ import annotations

import pytest
import torch

from samples.training.traces import measure_traces
from samples.training.visual_tokens import N_PREFIX


def _measure(moved):
    lit, present = torch.tensor([[True, False, True]]), torch.tensor([[True, True, False]])
    words = torch.tensor([[True, True, True, False]])
    changed = torch.tensor([0]), torch.tensor([N_PREFIX + 4])
    return measure_traces(moved, lit, present, words, changed)


def test_each_kind_of_token_has_its_own_mean_and_words_weigh_most():
    moved = torch.zeros(1, N_PREFIX + 7, 8)
    for position, size in ((N_PREFIX, 1.0), (N_PREFIX + 1, 2.0), (N_PREFIX + 3, 3.0), (N_PREFIX + 4, 4.0)):
        moved[0, position] = size
    # A video token and a word that are padding.
    moved[0, N_PREFIX + 2] = moved[0, N_PREFIX + 6] = 100.0
    loss, told = _measure(moved)
    words = 9.0 / (N_PREFIX + 2)
    assert told == pytest.approx(
        {"trace_lit": 1.0, "trace_unlit": 2.0, "trace_words": words**0.5, "trace_changed": 4.0}
    )
    assert loss.item() == pytest.approx(2 * (1 + 4) + 30 * words + 0.03 * 16)


def test_nothing_left_behind_costs_nothing():
    loss, _ = _measure(torch.zeros(1, N_PREFIX + 7, 8))
    assert loss.item() == 0.0
