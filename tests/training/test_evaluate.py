"""Evaluation scores held-out worlds."""

from __future__ import annotations

import numpy as np

from protokv.mini.phrases import TYPES
from samples.training.evaluate import evaluate, format_table, make_held_out_world
from samples.training.model import make_model
from tests.training.tiny import SMALL


def test_evaluation_scores_an_untrained_model_near_chance_and_prints_a_table():
    model = make_model(1, **SMALL).eval()
    cells = list(evaluate(model, lengths=[9], loads=["few"], ways=["full", "recent"], n=12))
    assert {cell.way for cell in cells} == {"full", "recent"}
    assert all(cells[0].asked[t] >= 10 for t in TYPES)
    assert np.mean(list(cells[0].accuracy.values())) < 0.4
    lines = list(format_table(cells))
    assert len(lines) == 2 + 1 + 2
    assert len({line.count("|") for line in lines}) == 1


def test_held_out_worlds_have_the_load_they_are_named_after():
    assert all(1 <= len(make_held_out_world("few", 37, i).events_until(37)) <= 4 for i in range(20))
    assert all(len(make_held_out_world("many", 90, i).events_until(90)) >= 5 for i in range(20))
