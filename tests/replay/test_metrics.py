"""Intervals, floors and quantiles."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protokv.replay.metrics import Accuracy, measure_floor, quantile
from tests.replay.rows import ROW


@pytest.mark.parametrize(
    ("right", "n", "low", "high"), [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (81, 263, 0.2553, 0.3662)]
)
def test_the_interval_is_wilsons(right: int, n: int, low: float, high: float) -> None:
    accuracy = Accuracy(right, n)
    assert accuracy.low == pytest.approx(low, abs=1e-4)
    assert accuracy.high == pytest.approx(high, abs=1e-4)


@given(st.integers(0, 500), st.integers(1, 500))
def test_the_interval_holds_the_share_and_stays_inside(right: int, n: int) -> None:
    accuracy = Accuracy(min(right, n), n)
    assert 0 <= accuracy.low <= accuracy.share + 1e-12
    assert accuracy.share - 1e-12 <= accuracy.high <= 1


def test_nothing_has_no_accuracy() -> None:
    assert math.isnan(Accuracy(0, 0).share)


def test_the_floor_is_the_most_frequent_answer_of_each_type() -> None:
    asked = [replace(ROW, question_id=str(i), type=t, expected=a) for i, (t, a) in enumerate(
        [("whether", "yes"), ("whether", "yes"), ("whether", "no"), ("colour", "red"), ("colour", "blue")]
    )]  # fmt: skip
    # The same questions under another memory or delay are the same questions.
    assert measure_floor([*asked, *(replace(row, memory="x", delay_s=9.0) for row in asked)]) == pytest.approx(3 / 5)


def test_quantiles_are_values_that_were_seen() -> None:
    assert [quantile([5.0, 1.0, 3.0, 2.0], share) for share in (0.0, 0.5, 0.95, 1.0)] == [1.0, 2.0, 5.0, 5.0]
