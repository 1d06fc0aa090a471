"""Files of questions and videos; each question is asked at its delays, or counted by the reason
that leaves it out.
"""

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protokv.errors import ConfigError
from protokv.replay.questions import (
    ASK_SLACK_S,
    DELAY_LADDER_S,
    ReplayQuestion,
    fit_delays,
    load_questions,
    plan_asks,
)
from protokv.replay.streams import open_replay_videos

SAMPLE = Path(__file__).parents[2] / "samples" / "short" / "video.mp4"
ASKED = {"question": "Who?", "answer": "Ann", "ask_s": 1}


def write(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_evidence_comes_before_the_query_time_as_reference(tmp_path: Path) -> None:
    seen = ASKED | {"type": "EPM", "evidence_s": 4, "video": "a.mp4"}
    asked = ASKED | {"id": 7, "lasts": False}
    (video, first), (none, second) = load_questions(
        write(tmp_path / "q.jsonl", f"\ufeff{json.dumps(seen)}", "", asked)
    )
    assert (video, none) == ("a.mp4", None)
    assert first == ReplayQuestion("1", "Who?", "Ann", "EPM", 4.0, "evidence")
    assert second == ReplayQuestion("7", "Who?", "Ann", "", 1.0, "query", retrospective=False)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "line 2: Input data was truncated"),
        ("[1]", "line 2: Expected `object`"),
        ({"question": "Who?", "evidence_s": 1}, "line 2: .* `answer`"),
        ({"question": "Who?", "answer": "Ann"}, "line 2: expected evidence_s or ask_s"),
        ({**ASKED, "answer": " "}, r"line 2: .*answer"),
        ({**ASKED, "ask_s": "soon"}, "ask_s"),
        ({**ASKED, "ask_s": -1}, "ask_s"),
        ({**ASKED, "lasts": "no"}, "lasts"),
    ],
)
def test_a_row_that_cannot_be_asked_is_refused_by_its_line(
    tmp_path: Path, row: object, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        load_questions(write(tmp_path / "q.jsonl", ASKED, row))


def test_questions_go_to_the_video_that_they_name(tmp_path: Path) -> None:
    other = tmp_path / "other.mp4"
    other.write_bytes(SAMPLE.read_bytes())
    named = [
        {**ASKED, "question": "A?", "video": "other"},
        {**ASKED, "question": "B?", "video": "video.mp4"},
    ]
    file = write(tmp_path / "q.jsonl", *named)
    streams = open_replay_videos([SAMPLE, other], file)
    assert [[question.text for question in stream.questions] for stream in streams] == [
        ["B?"],
        ["A?"],
    ]
    with pytest.raises(ConfigError, match="about other, which is none"):
        open_replay_videos([SAMPLE], file)
    write(file, ASKED)
    with pytest.raises(ConfigError, match="about no video, which is none"):
        open_replay_videos([SAMPLE, other], file)
    assert len(open_replay_videos([SAMPLE], file)[0].questions) == 1


def question(number: int, t0: float, kind: str = "colour") -> ReplayQuestion:
    return ReplayQuestion(
        str(number),
        f"question {number}?",
        "red",
        kind,
        t0,
        "evidence",
        retrospective=kind != "count",
    )


def test_only_questions_that_every_delay_leaves_room_for_are_asked_unless_that_is_not_wanted() -> (
    None
):
    questions = [question(i, t0) for i, t0 in enumerate((10.0, 55.0, 95.0, 200.0))]
    dropped = Counter[str]()
    asks = plan_asks(questions, [0, 30, 60], 120.0, dropped)
    assert [(ask.question.id, ask.at_s) for ask in asks] == [
        ("0", 10.0),
        ("0", 40.0),
        ("1", 55.0),
        ("0", 70.0),
        ("1", 85.0),
        ("1", 115.0),
    ]
    beyond = "beyond the end of the stream"
    assert dropped == {f"{beyond} at some delay": 1, beyond: 1}
    asks = plan_asks(questions, [0, 30, 60], 120.0, dropped, intersection=False)
    assert {ask.delay_s for ask in asks if ask.question.id == "2"} == {0}
    with pytest.raises(ConfigError, match="no delay"):
        plan_asks(questions, [], 120.0, dropped)


@pytest.mark.parametrize(
    ("delays", "types", "asked"),
    [
        ([0], None, "012"),
        ([0, 30], None, "02"),
        ([0, 30], ["all"], "012"),
        ([0, 30], ["count"], "1"),
    ],
)
def test_a_sweep_asks_what_lasts_or_the_named_types(
    delays: list[float], types: list[str] | None, asked: str
) -> None:
    mixed = [question(0, 5.0, ""), question(1, 5.0, "count"), question(2, 5.0, "colour")]
    dropped = Counter[str]()
    asks = plan_asks(mixed, delays, 120.0, dropped, types=types)
    assert {ask.question.id for ask in asks} == set(asked)
    assert types != ["count"] or dropped == {
        "type colour not asked for": 1,
        "type unnamed not asked for": 1,
    }


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
def test_delays_fit_the_room_of_half_of_them(
    rooms: list[float], wanted: tuple[float, ...], found: list[float]
) -> None:
    assert fit_delays(rooms, wanted) == found


@given(
    st.lists(st.tuples(st.floats(0, 300), st.sampled_from(["colour", "count", ""])), max_size=12),
    st.lists(st.floats(0, 200), min_size=1, max_size=4, unique=True),
    st.floats(1, 300),
    st.booleans(),
)
def test_every_question_is_asked_or_counted_as_dropped_and_none_beyond_the_end(
    drawn: list[tuple[float, str]], delays: list[float], length_s: float, intersection: bool
) -> None:
    questions = [question(i, t0, kind) for i, (t0, kind) in enumerate(drawn)]
    dropped = Counter[str]()
    asks = plan_asks(questions, delays, length_s, dropped, intersection=intersection)
    asked = {ask.question.id for ask in asks}
    assert len(asked) + dropped.total() == len(questions)
    assert all(ask.at_s <= length_s + ASK_SLACK_S for ask in asks)
    assert [ask.at_s for ask in asks] == sorted(ask.at_s for ask in asks)
    if intersection:
        assert len(asks) == len(asked) * len(delays)
