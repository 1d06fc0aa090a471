"""The schedule asks each question at its delays, and counts by reason the questions that it leaves out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protokv.errors import ConfigError
from protokv.replay.questions import ASK_SLACK_S, DELAY_LADDER_S, Question, fit_delays, schedule


def question(number: int, t0: float, kind: str = "colour") -> Question:
    return Question(str(number), f"question {number}?", "red", kind, t0, "evidence", retrospective=kind != "count")


QUESTIONS = [question(0, 10.0), question(1, 55.0), question(2, 95.0), question(3, 5.0, "count"), question(4, 200.0)]


def test_only_questions_that_every_delay_leaves_room_for_are_asked_at_all() -> None:
    plan = schedule(QUESTIONS, [0, 30, 60], 120.0)
    assert [(ask.question.id, ask.delay_s, ask.at_s) for ask in plan.asks] == [
        ("0", 0, 10.0), ("0", 30, 40.0), ("1", 0, 55.0), ("0", 60, 70.0), ("1", 30, 85.0), ("1", 60, 115.0),
    ]  # fmt: skip
    assert plan.dropped == {
        "type count, whose answers change with time": 1,
        "beyond the end of the stream at some delay": 1,
        "beyond the end of the stream": 1,
    }


def test_without_the_intersection_each_delay_has_what_it_can_have() -> None:
    plan = schedule(QUESTIONS, [0, 30, 60], 120.0, intersection=False)
    assert {ask.delay_s for ask in plan.asks if ask.question.id == "2"} == {0}
    assert plan.questions == 3


def test_a_sweep_asks_what_lasts_or_the_types_that_are_named_and_a_delay_of_zero_asks_all() -> None:
    mixed = [question(0, 5.0, ""), question(1, 5.0, "count"), question(2, 5.0, "colour")]
    for delays, types, asked in (([0], None, "012"), ([0, 30], None, "02"), ([0, 30], ["all"], "012")):
        assert {ask.question.id for ask in schedule(mixed, delays, 120.0, types=types).asks} == set(asked)
    named = schedule(mixed, [0, 30], 120.0, types=["count"])
    assert {ask.question.id for ask in named.asks} == {"1"}
    assert named.dropped == {"type colour not asked for": 1, "type unnamed not asked for": 1}


@pytest.mark.parametrize(
    ("rooms", "wanted", "found"),
    [
        ([3.0, 31.0, 40.0], DELAY_LADDER_S, [0, 5, 10, 30]),
        ([600.0], DELAY_LADDER_S, [0, 120, 300, 600]),
        ([46.0] * 5, (0, 30, 120, 180), [0, 30]),
        ([12.0] * 5, (0, 30, 120, 180), [0, 5, 10]),
        ([1.0], (0, 30), [0]),
        ([], DELAY_LADDER_S, [0]),
    ],
    ids=str,
)
def test_delays_are_fitted_to_what_half_of_the_questions_leave_room_for(
    rooms: list[float], wanted: tuple[float, ...], found: list[float]
) -> None:
    assert fit_delays(rooms, wanted) == found


def test_a_schedule_without_a_delay_is_refused() -> None:
    with pytest.raises(ConfigError, match="no delay"):
        schedule(QUESTIONS, [], 120.0)


@given(
    st.lists(
        st.tuples(st.floats(0, 300), st.sampled_from(["colour", "count", ""])),
        max_size=12,
    ),
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
    assert all(ask.at_s <= length_s + ASK_SLACK_S for ask in plan.asks)
    assert [ask.at_s for ask in plan.asks] == sorted(ask.at_s for ask in plan.asks)
    if intersection:
        assert len(plan.asks) == plan.questions * len(delays)
