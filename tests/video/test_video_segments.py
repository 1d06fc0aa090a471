"""Cutting a stream: nothing is lost, no cut hurts, no segment is too long. Also the ledger's arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from protokv.video.ledger import Ledger
from protokv.video.segments import segments


@dataclass(frozen=True)
class Packet:
    pts: int | None
    is_keyframe: bool


@st.composite
def streams(draw):
    """Groups of pictures in decoding order; an open group has pictures shown before its key frame."""
    made: list[Packet] = []
    clock = 0
    for _ in range(draw(st.integers(1, 12))):
        leading = draw(st.sampled_from([0, 0, 0, 2])) if made else 0
        length = draw(st.integers(1, 30))
        key = clock + leading
        made.append(Packet(key, True))
        made += [Packet(t, False) for t in range(clock, key)]
        rest = list(range(key + 1, key + length))
        for begin in range(0, len(rest), 3):
            made += [Packet(t, False) for t in [*rest[begin : begin + 3][-1:], *rest[begin : begin + 3][:-1]]]
        clock = key + length
    return made


@settings(max_examples=300, deadline=None)
@given(stream=streams(), limit=st.integers(2, 90))
def test_segments_hold_every_packet_once_and_each_stands_on_its_own(stream, limit):
    source = iter(stream)
    cut = list(segments(source, limit))
    rest = list(source)
    assert [p for s in cut for p in s.packets] + rest == stream
    assert all(s.fit for s in cut[:-1])
    for segment in cut:
        if segment.fit:
            assert len(segment.packets) <= limit
            assert segment.packets[0].is_keyframe
    for a, b in pairwise(cut):
        assert max(p.pts for p in a.packets) < b.packets[0].pts == min(p.pts for p in b.packets)
    if rest:
        assert not cut[-1].fit


def test_a_packet_without_time_or_before_any_key_frame_ends_the_cutting():
    assert [s.fit for s in segments([Packet(0, True), Packet(None, False)], 50)] == [False]
    assert [s.fit for s in segments([Packet(0, False), Packet(1, True)], 50)] == [False]
    assert list(segments([], 50)) == []


def test_a_frame_that_stays_away_is_lost_once_a_later_one_is_shown():
    ledger = Ledger()
    for time_s in (0.0, 0.2, 0.1, 0.3):
        ledger.sent(time_s)
    assert [ledger.shown(t) for t in (0.0, 0.2)] == [True, True]
    assert (ledger.damage.frames_lost, ledger.damage.lost_from_s) == (1, 0.1)
    ledger.finish()
    assert ledger.damage.frames_lost == 2
    assert ledger.damage.message == "2 frames could not be decoded, first at 0.10 s"


def test_a_frame_that_comes_out_of_order_is_not_given_and_counts_once():
    ledger = Ledger()
    ledger.sent(0.0)
    ledger.sent(0.1)
    assert ledger.shown(0.1)
    assert not ledger.shown(0.0)
    ledger.finish()
    assert ledger.damage.frames_lost == 1


def test_what_lies_before_the_start_does_not_count():
    ledger = Ledger(1.0)
    ledger.sent(0.5)
    ledger.failed(0.5, "rubbish")
    ledger.shown(0.7, corrupt=True)
    ledger.finish()
    assert ledger.damage.ok


def test_one_frame_is_spoken_of_in_the_singular():
    ledger = Ledger()
    ledger.missing(1, 2.0, "cut")
    ledger.shown(2.5, corrupt=True)
    assert ledger.damage.message == "1 frame could not be decoded and 1 frame is damaged, first at 2.00 s (cut)"
    assert ledger.damage.to_dict()["ok"] is False
