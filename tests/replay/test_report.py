"""The report adds up: intervals, floors, quantiles, and bootstrap over videos against the literal
procedure.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protokv.replay.metrics import (
    _DRAWS,
    _draw,
    bootstrap,
    bound_accuracy,
    compare_paired,
)
from protokv.replay.report import summarise_answers
from protokv.replay.rows import AnswerRow
from protokv.replay.tables import tabulate_report
from protokv.texts import JsonObject
from tests.replay.rows import ROW, example_rows

GROUPED = lambda kind, _: {"colour": "content", "first": "order"}[kind]  # noqa: E731


def points_of(report: JsonObject, name: str = "all") -> dict[tuple[str, int, float], JsonObject]:
    found = (point for point in report["points"] if point["name"] == name)
    return {(point["memory"], point["budget"], point["delay_s"]): point for point in found}


def test_the_report_adds_up() -> None:
    report = summarise_answers(example_rows(), GROUPED)
    assert (report["videos"], report["questions"], report["delays_s"]) == (1, 3, [0.0, 30.0, 120.0])
    assert report["facts"]["delay counts from"].endswith(
        "(2), the time that the question names (1)"
    )
    assert report["groups"] == ["content", "order"]
    found = points_of(report)
    assert [point["accuracy"] for point in found.values()] == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    assert {point["n"] for point in points_of(report, "content").values()} == {2}
    assert found["full", 64, 0.0]["ttft_ms_median"] == 2.0
    assert found["full", 64, 0.0]["compression"] == 10.0
    assert report["floor"] == pytest.approx(2 / 3, abs=1e-4)
    assert report["floors"] == {"content": 0.5, "order": 1.0}
    assert len({tuple(point) for point in report["points"]}) == 1
    json.dumps(report, allow_nan=False)
    # Questions of one group are not shown twice.
    assert {point["part"] for point in summarise_answers([replace(ROW, type="")])["points"]} == {
        "all",
        "type",
    }


def test_the_table_has_a_row_for_each_part_and_memory() -> None:
    report = summarise_answers(example_rows(), GROUPED)
    table = tabulate_report(report)
    cells = [" | ".join(row.values()) for row in table]
    assert " | ".join(table[0]) == (
        "questions | memory | budget | n | 0 s | 30 s | 2 min | difference | first token ms | "
        "step ms | KiB"
    )
    assert cells[0].startswith("all | full | all | 3 | 100% 44-100* | ")
    assert cells[1].startswith(
        "all | window | 64 | 3 | 100% 44-100* | 0% 0-56* | 0% 0-56* | -100 -100..+0* to full | "
    )
    assert cells[2].startswith("content | full | all | 2 | ")
    assert len(cells) == 2 * 3


def test_the_interval_is_wilsons() -> None:
    for right, n, bounds in (
        (0, 10, (0.0, 0.2775)),
        (81, 263, (0.2553, 0.3662)),
        (10, 10, (0.7225, 1.0)),
    ):
        assert bound_accuracy(right, n) == pytest.approx(bounds, abs=1e-4)


SCORES = st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=1, max_size=5)


@settings(max_examples=10, deadline=None)
@given(st.dictionaries(st.sampled_from("abcdefg"), SCORES, min_size=1))
def test_the_interval_is_that_of_videos_drawn_one_by_one(scores: dict[str, list[float]]) -> None:
    names = list(scores)
    means = []
    for weights in _draw(len(names)):
        drawn = [
            x for name, times in zip(names, weights, strict=True) for x in scores[name] * int(times)
        ]
        means.append(sum(drawn) / len(drawn))
    assert len(means) == _DRAWS
    assert bootstrap(scores) == pytest.approx(tuple(np.quantile(means, [0.025, 0.975])))


def rows(memory: str, right: list[list[bool]]) -> list[AnswerRow]:
    return [
        replace(
            ROW,
            memory=memory,
            config={"kind": memory},
            video=str(v),
            question_id=str(q),
            correct=is_right,
        )
        for v, answers in enumerate(right)
        for q, is_right in enumerate(answers)
    ]


def test_a_difference_is_of_the_same_questions_and_never_without_an_interval() -> None:
    one = rows("durable", [[True, True], [True, False], [True, True]])
    found = compare_paired(one, rows("other", [[True, False], [True, False], [False]]))
    assert found is not None
    assert (found.share, found.n) == (2 / 5, 5)
    assert found.low <= found.share <= found.high
    assert compare_paired(one, []) is None
    same = compare_paired(rows("durable", [[True] * 10] * 6), rows("full", [[True] * 10] * 6))
    assert same is not None
    assert (same.low, same.share, same.high) == (-0.05, 0.0, 0.05)


def test_memories_are_compared_with_the_default_and_the_default_with_the_full_cache() -> None:
    right = [[True] * 3] * 6
    wrong = [[False] * 3] * 6
    smaller = [replace(row, budget=8) for row in rows("durable", wrong)]
    report = summarise_answers(
        [*rows("full", right), *rows("durable", right), *rows("window", wrong), *smaller]
    )
    found = {
        key[:2]: (point["than"], point["difference"]) for key, point in points_of(report).items()
    }
    assert found == {
        ("full", 64): (None, None),
        ("durable", 64): ("full", 0.0),
        ("window", 64): ("durable", -1.0),
        ("durable", 8): ("full", -1.0),
    }


def test_what_is_recognised_among_choices_alone_is_not_remembered() -> None:
    asked = [
        # question, prompt of a benchmark, right
        ("Who came in?", "", True),
        ("Who came in?", "Who came in?\nA. Anna\nB. Bob", True),
        ("What fell?", "", False),
        ("What fell? A. a cup B. a plate", "", True),
        ("What broke?", "", False),
        ("What broke? A. it B. not", "", False),
        ("Who left?", "", True),
    ]
    rows = [
        replace(ROW, question_id=str(n), question=text, prompt=prompt, correct=right)
        for n, (text, prompt, right) in enumerate(asked)
    ]
    (found,) = summarise_answers([*rows, replace(rows[3], video="b")])["recalled"]
    assert {name: found[name] for name in ("n", "remembered", "recognised")} == {
        "n": 3,
        "remembered": 1,
        "recognised": 1,
    }
    assert summarise_answers(rows[::2])["recalled"] == []
