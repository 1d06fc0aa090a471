"""Times of a stream increase strictly and keep the stream's own spacing if it is credible; so do those of a file."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protokv.video.stamps import (
    HOLE_S,
    LONGEST_GAP_WITHOUT_END_S,
    LONGEST_HOLE_S,
    MOST_LATE,
    FileClock,
    Stamps,
    Timeline,
)

# Pairs of the real time between two arrivals and the time stamp.
ARRIVALS = st.lists(
    st.tuples(st.floats(0, 30), st.none() | st.floats(-1e6, 1e6, allow_nan=False)), min_size=1, max_size=40
)


def stamped(pairs, slack_s, interval_s=0.04):
    now_s = 0.0
    stamps = Stamps(slack_s, interval_s, lambda: now_s)
    found = []
    last_s = None
    for passed_s, own_s in pairs:
        now_s += passed_s
        if own_s is not None and last_s is not None and own_s < last_s - 1.0:
            stamps.begin_anew()
        last_s = last_s if own_s is None else own_s
        found.append((stamps(own_s), now_s))
    return found


@given(ARRIVALS, st.sampled_from([0.0, 0.5, 2.0, 60.0, math.inf]))
def test_times_start_at_0_and_increase_strictly(pairs, slack_s):
    times = [time_s for time_s, _ in stamped(pairs, slack_s) if time_s is not None]
    assert times[0] == 0.0
    assert all(b > a for a, b in pairwise(times))


@given(ARRIVALS, st.sampled_from([0.0, 0.5, 2.0]))
def test_a_live_stream_is_never_far_from_the_clock(pairs, slack_s):
    found = stamped(pairs, slack_s)
    began_s = found[0][1]
    for i, (time_s, now_s) in enumerate(found):
        # A burst of frames without time stamps is a millisecond apart.
        assert time_s is None or abs(time_s - (now_s - began_s)) <= slack_s + 1e-3 * i + 1e-6


def test_frames_that_come_in_bursts_keep_their_own_spacing():
    pairs = [(0.0 if i % 50 else 2.0, i * 0.04) for i in range(500)]
    times = [time_s for time_s, _ in stamped(pairs, 2.5)]
    assert all(abs(time_s - i * 0.04) < 1e-9 for i, time_s in enumerate(times))


def test_a_camera_that_starts_again_at_0_goes_on_at_real_time():
    pairs = [(0.1, 5.0 + 0.1 * i) for i in range(10)] + [(7.0, 0.0)] + [(0.1, 0.1 * i) for i in range(1, 10)]
    times = [time_s for time_s, _ in stamped(pairs, 1.0)]
    assert times[10] == 0.9 + 7.0
    assert abs(times[19] - (0.9 + 7.0 + 0.9)) < 1e-9


def test_frames_out_of_order_are_left_out_and_move_nothing():
    stamps = Stamps(math.inf)
    own = [0.0, 1.0, 6.0, 1.5, 6.5, 1.75, 7.0]
    assert [stamps(one) for one in own] == [0.0, 1.0, 6.0, None, 6.5, None, 7.0]


def test_a_new_count_is_found_after_some_late_frames():
    stamps = Stamps(math.inf, 0.5)
    assert [stamps(one) for one in (100.0, 101.0)] == [0.0, 1.0]
    found = [stamps(0.5 * i) for i in range(MOST_LATE + 4)]
    assert found == [None] * (MOST_LATE - 1) + [1.5 + 0.5 * i for i in range(5)]


def test_a_stream_with_its_own_clock_ignores_arrival():
    own = [0.0, 0.5, 60.0, 60.5]
    assert [time_s for time_s, _ in stamped([(9.0, one) for one in own], math.inf)] == own
    # Counting anew, backwards or far ahead, it goes on one interval later.
    for anew in (0.0, 1.0 + 2 * LONGEST_HOLE_S):
        times = [time_s for time_s, _ in stamped([(0.0, one) for one in (1.0, 2.0, anew, anew + 0.5)], math.inf, 0.25)]
        assert times == [0.0, 1.0, 1.25, 1.75]


STEP_S = 0.04


def placed(stamps, end_s=None):
    """Return the times of a file's frames, and how many stamps leap."""
    clock = FileClock(Timeline(end_s))
    found = [clock.place(one, STEP_S) for one in stamps]
    return [time_s for time_s, _ in found], sum(leaps for _, leaps in found)


@given(st.integers(1, 200), st.integers(1, 100), st.integers(1, 200), st.floats(LONGEST_GAP_WITHOUT_END_S + 9, 1e6))
def test_stamps_of_a_file_that_leap_and_come_back_move_no_other_frame(before, run, after, leap_s):
    true = [STEP_S * i for i in range(before + run + after)]
    stamps = [t + leap_s * (before <= i < before + run) for i, t in enumerate(true)]
    found, leaps = placed(stamps)
    assert found == pytest.approx(true, abs=1e-6)
    assert leaps == 1


@given(st.lists(st.floats(LONGEST_GAP_WITHOUT_END_S + 1, 1e6), min_size=1, max_size=5), st.integers(1, 50))
def test_a_file_of_joined_recordings_goes_on_at_each_leap(leaps_s, frames):
    stamps = [sum(leaps_s[:part]) + STEP_S * i for part in range(len(leaps_s) + 1) for i in range(frames)]
    found, leaps = placed(stamps)
    assert found == pytest.approx([STEP_S * i for i in range(len(stamps))], abs=1e-6)
    assert leaps == len(leaps_s)


@given(st.lists(st.floats(0.0, 599.0), max_size=20))
def test_a_pause_of_a_recording_stays_as_it_is(gaps_s):
    stamps = list(accumulate(gaps_s, initial=0.0))
    assert placed(stamps) == placed(stamps, end_s=stamps[-1]) == (stamps, 0)


def test_a_timeline_believes_times_near_the_declared_end_and_none_beyond_it():
    declared, open_ended = Timeline(100.0), Timeline()
    assert not declared.leaps(99.0, 119.0)
    assert declared.leaps(119.0, 121.0)
    assert declared.duration_s(99.0, 1e9) is None
    assert declared.duration_s(95.0, 5.0) == 5.0
    assert declared.duration_s(99.0, 5.0) is None
    assert declared.duration_s(99.9, HOLE_S) == open_ended.duration_s(99.9, HOLE_S) == HOLE_S
    assert open_ended.duration_s(99.0, 5.0) is None
    assert not open_ended.leaps(1e6, 1e6 + LONGEST_GAP_WITHOUT_END_S)
    assert open_ended.leaps(0.0, LONGEST_GAP_WITHOUT_END_S + 1)
