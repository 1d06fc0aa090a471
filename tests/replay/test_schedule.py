"""The protocol: what may be asked when, and what is left out why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protokv.errors import ConfigError, SourceNotFound
from protokv.replay.questions import RETROSPECTIVE, Question, load_questions
from protokv.replay.schedule import SLACK_S, schedule


def question(number: int, t0: float, kind: str = "colour") -> Question:
    return Question(str(number), f"question {number}?", "red", kind, t0, "evidence")


QUESTIONS = [question(0, 10.0), question(1, 55.0), question(2, 95.0), question(3, 5.0, "count"), question(4, 200.0)]


def test_only_questions_that_every_delay_leaves_room_for_are_asked_at_all() -> None:
    plan = schedule(QUESTIONS, [0, 30, 60], 120.0)
    assert [(ask.question.id, ask.delay_s, ask.at_s) for ask in plan.asks] == [
        ("0", 0, 10.0), ("0", 30, 40.0), ("1", 0, 55.0), ("0", 60, 70.0), ("1", 30, 85.0), ("1", 60, 115.0),
    ]  # fmt: skip
    assert plan.dropped == {
        "type count is not retrospective": 1,
        "beyond the end of the stream at some delay": 1,
        "beyond the end of the stream": 1,
    }


def test_without_the_intersection_each_delay_has_what_it_can_have() -> None:
    plan = schedule(QUESTIONS, [0, 30, 60], 120.0, intersection=False)
    assert {ask.delay_s for ask in plan.asks if ask.question.id == "2"} == {0}
    assert plan.questions == 3


def test_a_single_delay_of_zero_is_no_sweep_and_asks_every_type() -> None:
    assert schedule(QUESTIONS, [0], 120.0).questions == 4


def test_types_that_are_named_replace_the_retrospective_ones() -> None:
    plan = schedule(QUESTIONS, [0, 30], 120.0, types=["count"])
    assert {ask.question.id for ask in plan.asks} == {"3"}
    assert plan.dropped["type colour not asked for"] == 4


def test_a_schedule_without_a_delay_is_refused() -> None:
    with pytest.raises(ConfigError, match="no delay"):
        schedule(QUESTIONS, [], 120.0)


@given(
    st.lists(st.tuples(st.floats(0, 300), st.sampled_from([*sorted(RETROSPECTIVE), "count", ""])), max_size=12),
    st.lists(st.floats(0, 200), min_size=1, max_size=4, unique=True),
    st.floats(1, 300),
    st.booleans(),
)
def test_every_question_is_asked_or_counted_as_dropped_and_none_beyond_the_end(
    drawn: list[tuple[float, str]], delays: list[float], length_s: float, intersection: bool
) -> None:
    questions = [question(i, t0, kind) for i, (t0, kind) in enumerate(drawn)]
    plan = schedule(questions, delays, length_s, intersection=intersection)
    assert plan.questions + plan.dropped.total() == len(questions)
    assert all(ask.at_s <= length_s + SLACK_S for ask in plan.asks)
    assert [ask.at_s for ask in plan.asks] == sorted(ask.at_s for ask in plan.asks)
    if intersection:
        assert len(plan.asks) == plan.questions * len(delays)


def write(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_evidence_comes_before_the_query_time_as_reference(tmp_path: Path) -> None:
    file = write(
        tmp_path / "q.jsonl",
        {"question": "Who?", "answer": "Ann", "type": "EPM", "evidence_s": 4, "ask_s": 60, "video": "a.mp4"},
        "",
        {"question": "What?", "answer": "tea", "task": "ASI", "realtime": 33.5, "id": 7},
    )
    (video, first), (none, second) = load_questions(file)
    assert (video, first.reference, first.reference_s, first.type) == ("a.mp4", "evidence", 4.0, "EPM")
    assert (none, second.reference, second.reference_s, second.id) == (None, "query", 33.5, "7")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2 is not a JSON object"),
        ({"question": "Who?", "evidence_s": 1}, "line 2: answer must be text"),
        ({"question": "Who?", "answer": "Ann"}, "line 2: expected evidence_s"),
        ({"question": "Who?", "answer": "Ann", "ask_s": "soon"}, "got 'soon'"),
        ({"question": "Who?", "answer": "Ann", "ask_s": -1}, "got -1"),
        ({"question": "Who?", "answer": "Ann", "ask_s": True}, "got True"),
    ],
)
def test_a_row_that_cannot_be_asked_is_refused_by_its_line(tmp_path: Path, row: object, said: str) -> None:
    file = write(tmp_path / "q.jsonl", {"question": "Who?", "answer": "Ann", "ask_s": 1}, row)
    with pytest.raises(ConfigError, match=said):
        load_questions(file)


def test_a_missing_file_of_questions_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFound, match=r"absent\.jsonl"):
        load_questions(tmp_path / "absent.jsonl")
