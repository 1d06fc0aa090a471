"""The report adds up."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from protokv.replay.report import summarise
from protokv.replay.tables import format_delay
from tests.replay.rows import example_rows


def test_the_report_adds_up() -> None:
    report = summarise(example_rows())
    assert (report["videos"], report["questions"], report["delays_s"]) == (1, 3, [0.0, 30.0, 120.0])
    assert report["reference"] == {"evidence": 2, "query": 1}
    full, window = report["curves"]
    assert [point["accuracy"] for point in full["all"]] == [1.0, 1.0, 1.0]
    assert [point["accuracy"] for point in window["all"]] == [1.0, 0.0, 0.0]
    assert [point["n"] for point in window["groups"]["content"]] == [2, 2, 2]
    assert [point["n"] for point in window["types"]["first"]] == [1, 1, 1]
    assert report["costs"][0]["ttft_ms_median"] == 2.0
    assert report["costs"][0]["compression"] == 10.0
    floors = {"groups": {"content": 0.5, "order": 1.0}, "types": {"colour": 0.5, "first": 1.0}}
    assert report["floors"] == floors
    json.dumps(report, allow_nan=False)


def test_a_point_that_no_question_stands_on_is_left_out() -> None:
    kept = [row for row in example_rows() if not (row.delay_s == 120.0 and row.type == "first")]
    curve = summarise(kept)["curves"][0]
    assert [point["delay_s"] for point in curve["types"]["first"]] == [0.0, 30.0]


def test_the_full_cache_shows_all_that_it_has_seen() -> None:
    seen = [replace(row, context_tokens=row.tokens_seen) for row in example_rows()]
    assert [cost["compression"] for cost in summarise(seen)["costs"]] == [1.0, 1.0]


def test_questions_without_a_known_group_are_not_shown_twice() -> None:
    report = summarise([replace(row, type="") for row in example_rows()])
    assert report["curves"][0]["groups"] == {}


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (5, "5 s"), (90, "90 s"), (120, "2 min"), (400, "400 s"), (7200, "2 h")]
)
def test_a_delay_is_written_in_the_largest_whole_unit(seconds: float, text: str) -> None:
    assert format_delay(seconds) == text
