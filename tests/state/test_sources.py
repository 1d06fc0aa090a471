"""The records of sources: what follows what, and the log of a live stream, which converts times and
is bounded.
"""

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protokv.errors import StateCorrupt
from protokv.state.sources import (
    _MOST,
    WallClockLog,
    is_earlier_state,
    list_state_sources,
    list_video_places,
    make_next_segment,
    read_fingerprints,
    read_last_segment,
)
from tests.state.conftest import moment as at

STEPS = st.lists(st.tuples(st.floats(0.1, 1e5), st.floats(-1e3, 1e5)), min_size=1, max_size=30)


def test_the_log_is_bounded_whether_the_clock_is_steady_or_wrong_and_the_beginning_stays() -> None:
    log = WallClockLog()
    wrong = WallClockLog()
    for i in range(1000):
        log.begin_gap(60.0 * i + 50, "gone")
        log.end_gap(60.0 * i + 60)
        log.add_anchor(60.0 * i + 60, 1e9 + 60.0 * i + 60 + (i % 2))
        wrong.add_anchor(10.0 * i, 1e9 + 100.0 * i)
    assert len(log.anchors) == 1
    assert (log.gaps_in_all, round(log.lost_s), len(log.gaps)) == (1000, 10_000, _MOST)
    assert len(wrong.anchors) == _MOST
    assert (wrong.anchors[0], wrong.anchors[-1]) == ((0.0, 1e9), (9990.0, 1e9 + 99_900.0))


@given(STEPS)
def test_stream_time_and_real_time_are_inverse(steps: list[tuple[float, float]]) -> None:
    log = WallClockLog()
    stream_s = 0.0
    real_s = 1e9
    for passed_s, adjusted_s in steps:
        log.add_anchor(stream_s, real_s)
        stream_s = stream_s + passed_s
        real_s = real_s + passed_s + max(0.0, adjusted_s)
    for i, (at_s, real) in enumerate(log.anchors):
        until_s = log.anchors[i + 1][0] if i + 1 < len(log.anchors) else at_s + 100.0
        for part in (0.0, 0.25, 0.9):
            inside_s = at_s + part * (until_s - at_s)
            assert log.stream_time(log.real_time(inside_s)) == pytest.approx(inside_s, abs=1e-3)
        assert log.real_time(at_s) == real
    assert log.stream_time(1e9 - 1.0) == float("-inf")


def test_the_log_survives_a_state_and_nonsense_is_refused() -> None:
    log = WallClockLog(anchors=[(0.0, 1e9)], frames_dropped=3, committed_at=1e9)
    log.begin_gap(1.0, "x\ny")
    record = json.loads(json.dumps(asdict(log)))
    assert WallClockLog.read({"live": record}) == log
    assert WallClockLog.read({}) is None
    assert WallClockLog.read(None) is None
    wrongs: tuple[Any, ...] = (
        [],
        "x",
        {},
        record | {"anchors": []},
        record | {"anchors": [[1]]},
        record | {"lost_s": "1"},
        record | {"gaps": [{"from_s": 1}]},
        record | {"frames_dropped": 1.5},
        record | {"committed_at": 1e300},
    )
    for wrong in wrongs:
        with pytest.raises(StateCorrupt, match=r"source\.live"):
            WallClockLog.read({"live": wrong})


ONE, TWO, THREE = ({"name": f"{letter}.mp4", "fingerprint": letter} for letter in "abc")


def test_sources_are_listed_in_order_with_the_beginning_of_each() -> None:
    state = at(3, source=ONE, complete=True)
    for step, source in [(5, TWO), (9, THREE)]:
        segment = make_next_segment(state)
        clock = state.clock
        assert (segment.first_step, segment.start_s) == (clock.steps, clock.stream_time_s)
        state = at(step, source=segment.record(source), complete=True)
        assert read_last_segment(state) == replace(segment, done=True)
    assert read_fingerprints(state) == ("a", "b", "c")
    assert is_earlier_state(at(1), at(2))
    unknown = (None, {"name": "rtsp://camera/1"}, {"name": "a.mp4", "fingerprint": None})
    for nameless in unknown:
        assert not is_earlier_state(at(1, source=nameless), at(2, source=nameless)), (
            "without a fingerprint it equals no other"
        )


def test_a_record_that_makes_no_sense_is_named() -> None:
    good = {**TWO, "earlier": [ONE], "first_step": 1, "start_s": 2.0}
    read_last_segment(at(3, source=good))
    for field, value in (("earlier", 5), ("earlier", ["a"]), ("first_step", 1.5), ("start_s", "0")):
        with pytest.raises(StateCorrupt, match=rf"source: .*\$\.{field}"):
            read_last_segment(at(3, source={**good, field: value}))


@pytest.mark.parametrize("part", ["x", "nan", "1e999", "-"])
def test_a_part_of_a_video_that_makes_no_sense_is_refused(part: str) -> None:
    header = replace(at(1), source={"name": "a.mp4 from 3 s", "fingerprint": f"ab@{part}+9"})
    with pytest.raises(StateCorrupt, match="makes no sense"):
        list_video_places(list_state_sources(header))
