"""Batches of every stage, and when an answer counts as right."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from protokv.mini.phrases import TYPES
from samples.training.batches import IGNORED, judge_answers, make_batch
from samples.training.curriculum import CURRICULUM
from samples.training.loop import rate_at


@pytest.mark.parametrize("stage", CURRICULUM, ids=lambda s: s.name)
def test_every_stage_of_the_curriculum_makes_batches(composer, stage):
    rng = np.random.default_rng(6)
    kinds = set()
    for i in range(6):
        batch = make_batch(rng, composer, replace(stage, tokens=400), i / 6)
        kinds |= set(batch.types)
        assert ((batch.labels != IGNORED).sum(-1) >= 2).all()
        assert (batch.tokens.times[:, -1] < batch.tokens.end).all()
        if batch.tokens.seen is not None:
            assert batch.tokens.seen.any(-1).all()
            assert not batch.tokens.seen.all()
    assert kinds <= set(stage.weights) | {"whether"}


def test_the_curriculum_asks_everything_in_the_end_over_spans_of_ten_minutes():
    last = CURRICULUM[-1]
    assert set(last.weights) == set(TYPES)
    assert max(span for span, _ in last.spans) >= 640
    assert rate_at(last, last.steps - 1) < 0.02 * last.rate
    assert rate_at(last, 0) < rate_at(last, last.warm_up)


def test_an_answer_is_right_when_its_words_are_whatever_its_end_is():
    labels = torch.tensor([[[IGNORED, 40, 41, 2]], [[IGNORED, 40, 2, IGNORED]]])
    logits = torch.zeros(5, 128)
    logits[[0, 1, 3], [40, 41, 39]] = 1.0
    assert judge_answers(logits, labels) == [True, False]
