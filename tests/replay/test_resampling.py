"""Bootstrap over videos and paired differences, against the literal procedure."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protokv.replay.metrics import DRAWS, _draw, compare, resample
from protokv.replay.report import summarise
from protokv.replay.rows import Row
from tests.replay.rows import ROW

ANSWERS = st.dictionaries(
    st.sampled_from("abcdefg"), st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=1, max_size=5), min_size=1
)


@settings(max_examples=10, deadline=None)
@given(ANSWERS)
def test_the_interval_is_that_of_videos_drawn_one_by_one(scores: dict[str, list[float]]) -> None:
    names, means = list(scores), []
    for weights in _draw(len(names)):
        drawn = [x for name, times in zip(names, weights, strict=True) for x in scores[name] * int(times)]
        means.append(sum(drawn) / len(drawn))
    assert len(means) == DRAWS
    assert resample(scores) == pytest.approx(tuple(np.quantile(means, [0.025, 0.975])))


def test_draws_take_as_many_videos_as_there_are_each_equally_often() -> None:
    weights = _draw(8)
    assert (weights.sum(1) == 8).all()
    assert np.abs(weights.mean(0) - 1).max() < 0.1


def rows(memory: str, right: list[list[bool]]) -> list[Row]:
    return [
        replace(ROW, memory=memory, config={"kind": memory}, video=str(v), question_id=str(q), correct=is_right)
        for v, answers in enumerate(right)
        for q, is_right in enumerate(answers)
    ]


def test_answers_that_go_together_widen_the_interval() -> None:
    together, apart = ([[v < 5] * 10 for v in range(10)], [[q < 5 for q in range(10)] for _ in range(10)])
    wide, narrow = (summarise(rows("durable", answers))["curves"][0]["all"][0] for answers in (together, apart))
    assert wide["accuracy"] == narrow["accuracy"] == 0.5
    assert wide["high"] - wide["low"] > 2 * (narrow["high"] - narrow["low"])


def test_a_difference_is_of_the_same_questions() -> None:
    one = rows("durable", [[True, True], [True, False], [True, True]])
    other = rows("other", [[True, False], [True, False], [False]])
    found = compare(one, other)
    assert found is not None
    assert (found.share, found.n, found.videos) == (2 / 5, 5, 3)
    assert found.low <= found.share <= found.high
    assert compare(one, []) is None


def test_memories_without_a_different_answer_are_equal_up_to_what_so_few_can_show() -> None:
    same = [[True] * 10] * 6
    found = compare(rows("durable", same), rows("full", same))
    assert found is not None
    assert (found.low, found.share, found.high) == (-0.05, 0.0, 0.05)


def test_the_report_compares_the_default_with_each_other_memory_at_its_budget_and_with_the_full_cache() -> None:
    right, wrong = [[True] * 3] * 6, [[False] * 3] * 6
    found = summarise(
        [
            *rows("full", right),
            *rows("durable", right),
            *rows("window", wrong),
            *(replace(row, budget=8) for row in rows("durable", wrong)),
        ]
    )["differences"]
    pairs = {(d["memory"], d["budget"], d["than"]): d for d in found if d["group"] == "all"}
    assert set(pairs) == {("durable", 64, "full"), ("durable", 64, "window"), ("durable", 8, "full")}
    points = [pairs[pair]["points"][0]["difference"] for pair in pairs]
    assert sorted(points) == [-1.0, 0.0, 1.0]
