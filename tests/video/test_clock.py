"""Times of a stream increase strictly and keep the stream's own spacing if it is credible, on one
clock.
"""

import math
from collections.abc import Collection, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from protokv.video.clock import (
    _HOLE_S,
    LONGEST_GAP_S,
    LONGEST_PAUSE_S,
    ArrivalClock,
    PacketClock,
    PacketTiming,
)

# Pairs of the real time between two arrivals and the time stamp.
ARRIVALS = st.lists(
    st.tuples(st.floats(0, 30), st.none() | st.floats(-1e6, 1e6, allow_nan=False)),
    min_size=1,
    max_size=40,
)
STEP_S = 0.04


def arrived(
    pairs: list[tuple[float, float | None]], slack_s: float
) -> list[tuple[float | None, float]]:
    now_s = 0.0
    clock = ArrivalClock(slack_s, lambda: now_s)
    found = []
    last_s = None
    for passed_s, own_s in pairs:
        now_s += passed_s
        if own_s is not None and last_s is not None and own_s < last_s - 1.0:
            clock.begin_anew()
        last_s = last_s if own_s is None else own_s
        found.append((clock(own_s), now_s))
    return found


@given(ARRIVALS, st.sampled_from([0.0, 0.5, 2.0, 60.0]))
def test_a_live_stream_begins_at_0_goes_forward_and_is_never_far_from_the_clock(
    pairs: list[tuple[float, float | None]], slack_s: float
) -> None:
    found = arrived(pairs, slack_s)
    began_s = found[0][1]
    times = [time_s for time_s, _ in found if time_s is not None]
    assert times[0] == 0.0
    assert all(b > a for a, b in pairwise(times))
    for i, (time_s, now_s) in enumerate(found):
        # A burst of frames without time stamps is a millisecond apart.
        assert time_s is None or abs(time_s - (now_s - began_s)) <= slack_s + 1e-3 * i + 1e-6


def test_bursts_keep_their_spacing_and_a_camera_that_restarts_goes_on_at_real_time() -> None:
    pairs: list[tuple[float, float | None]]
    pairs = [(0.0 if i % 50 else 2.0, i * 0.04) for i in range(500)]
    assert [time_s for time_s, _ in arrived(pairs, 2.5)] == pytest.approx(
        [i * 0.04 for i in range(500)]
    )
    restarted: list[tuple[float, float | None]] = [
        *((0.1, 5.0 + 0.1 * i) for i in range(10)),
        (7.0, 0.0),
        *((0.1, 0.1 * i) for i in range(1, 10)),
    ]
    times = [time_s for time_s, _ in arrived(restarted, 1.0)]
    assert (times[10], times[19]) == (0.9 + 7.0, pytest.approx(0.9 + 7.0 + 0.9))


def test_frames_of_a_camera_out_of_order_are_left_out() -> None:
    clock = ArrivalClock(1e9, lambda: 0.0)
    own = [0.0, 1.0, 6.0, 1.5, 6.5, 1.75, 7.0]
    assert [clock(one) for one in own] == [0.0, 1.0, 6.0, None, 6.5, None, 7.0]


def settled(
    stamps_s: Sequence[float],
    end_s: float | None = None,
    keys: Collection[int] = (),
    length_s: float = STEP_S,
    *,
    carried_s: float = math.inf,
    longest_pause_s: float = LONGEST_PAUSE_S,
) -> tuple[list[float], list[float], list[str]]:
    """Return the times of a file's packets, and what was said: joins (times) and damage (words)."""
    packets = [
        SimpleNamespace(
            pts=round(s * 1000),
            dts=None,
            duration=round(length_s * 1000),
            size=99,
            is_corrupt=False,
            is_keyframe=i in keys,
            stream=None,
        )
        for i, s in enumerate(stamps_s)
    ]
    joins: list[float] = []
    damage: list[str] = []
    account: Any = SimpleNamespace(
        note_join=joins.append, note_damage=lambda time_s, why: damage.append(why)
    )
    base = Fraction(1, 1000)
    timing = PacketTiming(base, 0, length_s, end_s, end_s, end_s or 0.0, carried_s, longest_pause_s)
    clock = PacketClock(timing, account, from_origin=True)
    return [one.pts / 1000 for one in clock.settle(iter(packets)) if one is not None], joins, damage


def steady(frames: int, from_s: float = 0.0, step_s: float = STEP_S) -> list[float]:
    return [round(from_s + step_s * i, 3) for i in range(frames)]


@given(
    st.integers(1, 200), st.integers(1, 200), st.integers(2, 200), st.floats(LONGEST_GAP_S + 9, 1e6)
)
@example(50, 1, 149, 6.0)
@example(50, 1, 149, -1.5)
def test_stamps_that_leap_and_come_back_move_no_other_frame(
    before: int, run: int, after: int, leap_s: float
) -> None:
    true = steady(before + run + after)
    leaping = [t + leap_s * (before <= i < before + run) for i, t in enumerate(true)]
    # A key frame that leaps alone begins no recording.
    found, joins, damage = settled(leaping, keys=range(len(true) if run == 1 else 0))
    assert found == pytest.approx(true, abs=2e-3)
    assert (joins, len(damage)) == ([], 1)


@pytest.mark.parametrize("parts", [2, 5])
@pytest.mark.parametrize("step_s", [STEP_S, 5.0])
def test_recordings_that_are_joined_go_on_with_their_own_spacing(parts: int, step_s: float) -> None:
    """They begin at the same time, or half a day later than anything before."""
    for leap_s in (0.0, LONGEST_PAUSE_S + 30_000):
        stamps = [s for part in range(parts) for s in steady(50, part * leap_s, step_s)]
        found, joins, damage = settled(stamps, keys=range(0, 50 * parts, 50), length_s=step_s)
        assert found == pytest.approx(steady(50 * parts, 0.0, step_s), abs=1e-6)
        assert joins == pytest.approx([50 * step_s * part for part in range(1, parts)])
        assert damage == []


@given(st.lists(st.floats(0.0, 599.0), max_size=20))
def test_a_short_pause_stays_as_it_is(gaps_s: list[float]) -> None:
    stamps = [round(one, 3) for one in accumulate(gaps_s, initial=0.0)]
    assert settled(stamps) == settled(stamps, end_s=stamps[-1]) == (stamps, [], [])


@pytest.mark.parametrize("pause_s", [900.0, 5400.0, 20_000.0])
@pytest.mark.parametrize("after", [2, 5, 400])
def test_a_long_pause_is_believed_if_later_stamps_or_the_declared_end_confirm_it(
    pause_s: float, after: int
) -> None:
    slides = [0.0, 1700.0, 4400.0, 9400.0]
    stamps = [*steady(50), *steady(after, 2.0 + pause_s)]
    for end_s in (None, stamps[-1]):
        assert settled(stamps, end_s) == (stamps, [], [])
        # Nothing follows the last slide, but it is no longer than twice the others.
        assert settled(slides, end_s and slides[-1]) == (slides, [], [])
    # Nothing confirms the last stamp of all, nor one that the declared end denies.
    assert settled([*steady(50), 2.0 + pause_s])[2]
    found, _, damage = settled(stamps, end_s=2.0)
    assert found == pytest.approx(steady(50 + after))
    assert len(damage) == 1


@pytest.mark.parametrize("step_s", [60.0, 2048.0, 40_000.0])
@pytest.mark.parametrize("size", [500, 6000, 20_000])
def test_no_stream_is_longer_than_its_bytes_can_carry(size: int, step_s: float) -> None:
    """Damaged stamps leap, and later ones confirm it; as long as slides stay, they do not."""
    carried_s = size / 0.25
    times, _, damage = settled(steady(40, 0.0, step_s), length_s=step_s, carried_s=carried_s)
    assert all(a < b for a, b in pairwise(times))
    assert times[-1] <= carried_s + 40
    fits = step_s * 39 <= carried_s
    assert (not damage, times[-1] == step_s * 39) == (fits, fits)


def test_stamps_that_leap_beyond_the_length_that_a_header_states_are_no_pause() -> None:
    """As those of a damaged FLV, whose header says how long it is."""
    stamps = [*steady(30), *steady(30, 3600.0)]
    assert settled(stamps)[0] == stamps
    assert settled(stamps, longest_pause_s=LONGEST_GAP_S)[0][-1] < 5.0


def test_pictures_in_another_order_than_they_are_shown_are_no_damage() -> None:
    """Slides with B frames: the packet of a later picture comes first."""
    stamps = [0.0, 2000.0, 700.0, 1400.0, 4000.0, 2700.0, 3400.0, 4100.0, 4050.0, 4200.0]
    assert settled(stamps, end_s=4200.0, keys=(0,)) == (stamps, [], [])


@pytest.mark.parametrize(
    ("time_s", "stated_s", "end_s", "stays"),
    [
        (95.0, 5.0, 100.0, True),
        (99.9, _HOLE_S, None, True),
        (99.0, 5.0, 100.0, False),
        (9.0, 0.0, 100.0, False),
    ],
)
def test_a_frame_stays_as_long_as_it_says_within_the_declared_end(
    time_s: float, stated_s: float, end_s: float | None, stays: bool
) -> None:
    timing = PacketTiming(Fraction(1, 1000), 0, declared_s=end_s)
    frame = SimpleNamespace(duration=round(stated_s * 1000))
    assert timing.stays_s(time_s, frame) == (stated_s if stays else None)
