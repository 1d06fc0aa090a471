"""Rows that survive, intervals that are right, and a report that adds up."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protokv.errors import ConfigError, SourceNotFound
from protokv.replay.figure import save_html, save_png
from protokv.replay.judge import is_expected
from protokv.replay.metrics import Accuracy, measure_floor, quantile
from protokv.replay.report import summarise
from protokv.replay.rows import Row, RowFile, read_rows

ROW = Row(
    video="a", question_id="1", question="What?", type="colour", expected="red", reference="evidence",
    reference_s=3.0, delay_s=0.0, asked_s=3.0, memory="full", budget=64, config={"kind": "full"}, prediction="red",
    correct=True, ttft_ms=2.0, total_ms=5.0, context_tokens=70, state_bytes=1000, peak_bytes=5000,
    seconds_per_step=0.01, tokens_seen=640,
)  # fmt: skip


def rows() -> list[Row]:
    found = []
    for memory, right_until in (("full", 120.0), ("window", 0.0)):
        for delay in (0.0, 30.0, 120.0):
            for number, (kind, answer) in enumerate([("colour", "red"), ("colour", "blue"), ("first", "ring")]):
                right = delay <= right_until
                found.append(
                    replace(
                        ROW, memory=memory, delay_s=delay, question_id=str(number), type=kind, expected=answer,
                        correct=right, ttft_ms=1.0 + number, reference="query" if number == 2 else "evidence",
                    )
                )  # fmt: skip
    return found


def test_rows_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    file = RowFile(tmp_path / "r.jsonl")
    for row in rows():
        file.append(row)
    assert read_rows([tmp_path / "r.jsonl"]) == rows()
    assert RowFile(tmp_path / "r.jsonl").rows.keys() == {row.key for row in rows()}


@pytest.mark.parametrize("cut", [2, 20, 200])
def test_a_torn_last_line_is_dropped_and_the_file_goes_on(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "r.jsonl"
    file = RowFile(path)
    for row in rows():
        file.append(row)
    path.write_bytes(path.read_bytes()[:-cut])
    assert read_rows([path]) == rows()[:-1]
    again = RowFile(path)
    again.append(rows()[-1])
    assert read_rows([path]) == rows()


def test_a_line_in_the_middle_that_is_no_row_is_refused_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(asdict(ROW)) + '\n{"video": "a"}\n' + json.dumps(asdict(ROW)) + "\n")
    with pytest.raises(ConfigError, match=r"line 2 .* question_id is missing"):
        read_rows([path])
    with pytest.raises(SourceNotFound, match="absent"):
        read_rows([tmp_path / "absent"])


def test_packed_rows_are_read_and_damaged_ones_refused(tmp_path: Path) -> None:
    lines = "".join(json.dumps(asdict(row)) + "\n" for row in rows())
    packed = tmp_path / "r.jsonl.gz"
    packed.write_bytes(gzip.compress(lines.encode()))
    assert read_rows([packed]) == rows()
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(ConfigError, match=r"r\.jsonl\.gz cannot be read"):
        read_rows([packed])


def test_the_same_row_of_a_later_file_replaces_the_earlier(tmp_path: Path) -> None:
    for name, answer in (("a", "red"), ("b", "blue")):
        RowFile(tmp_path / name).append(replace(ROW, prediction=answer))
    (row,) = read_rows([tmp_path / "a", tmp_path / "b"])
    assert row.prediction == "blue"


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


@pytest.mark.parametrize(
    ("answer", "expected", "right"),
    [("Red.", "red", True), ("  the  Ring", "the ring", True), ("yes", "no", False), ("", "red", False)],
)
def test_answers_are_compared_as_words(answer: str, expected: str, right: bool) -> None:
    assert is_expected(answer, expected) is right


def test_the_report_adds_up() -> None:
    report = summarise(rows())
    assert (report["videos"], report["questions"], report["delays_s"]) == (1, 3, [0.0, 30.0, 120.0])
    assert report["reference"] == {"evidence": 2, "query": 1}
    full, window = report["curves"]
    assert [point["accuracy"] for point in full["all"]] == [1.0, 1.0, 1.0]
    assert [point["accuracy"] for point in window["all"]] == [1.0, 0.0, 0.0]
    assert [point["n"] for point in window["groups"]["content"]] == [2, 2, 2]
    assert [point["n"] for point in window["types"]["first"]] == [1, 1, 1]
    assert report["costs"][0]["ttft_ms_median"] == 2.0
    assert report["costs"][0]["compression"] == 10.0
    json.dumps(report, allow_nan=False)


def test_a_point_that_no_question_stands_on_is_left_out() -> None:
    kept = [row for row in rows() if not (row.delay_s == 120.0 and row.type == "first")]
    curve = summarise(kept)["curves"][0]
    assert [point["delay_s"] for point in curve["types"]["first"]] == [0.0, 30.0]


def test_figure_and_page_are_written_and_need_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = summarise([*rows(), *(replace(row, budget=16) for row in rows())])
    save_png(report, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    save_html(report, tmp_path / "x.html")
    page = (tmp_path / "x.html").read_text()
    assert "<svg" in page
    assert "window, 16" in page
    assert not [mark for mark in ("<script", "src=", "@import", 'href="http') if mark in page]
    with pytest.raises(ConfigError, match=r"x\.doc"):
        save_png(report, tmp_path / "x.doc")
