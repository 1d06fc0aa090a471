"""A hole between time stamps is believed where the stream goes on behind it; a damaged stamp moves no other frame.

Nor does a damaged scale of all stamps stretch a file, while one that the file confirms is believed, however slow.
"""

from __future__ import annotations

import random
import re
from fractions import Fraction
from itertools import accumulate, chain, pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protokv.video import holes as module
from protokv.video import open_source, read_steps
from protokv.video.holes import CLOCK_FRAMES, CONFIRM_S, Clock, PacketLookahead, beginning_s
from protokv.video.stamps import HOLE_S, Timeline

STEP_S = 0.04


def placed(stamps: list[float], end_s: float | None = None, group: int = 1) -> tuple[list[float], int]:
    """The times given to frames with these stamps, and how many were moved.

    `group`: the last packet of so many comes first, as one that others refer to, and its frame last.
    """
    order = [i for at in range(0, len(stamps), group) for i in rotated(range(at, min(at + group, len(stamps))))]
    ahead = PacketLookahead([SimpleNamespace(size=1, at=i) for i in order], lambda packet: stamps[packet.at])
    clock, found, moved, sent = Clock(Timeline(end_s), ahead), [], 0, set()
    for packet in chain(ahead, [None]):
        sent |= set() if packet is None else {packet.at}
        while len(found) in sent and (packet is None or len(sent) > len(found) + group):
            awaited = [stamps[i] for i in sent if i > len(found)]
            time_s, was_moved = clock.place(stamps[len(found)], STEP_S, awaited)
            found.append(time_s)
            moved += was_moved
    return found, moved


def rotated(group):
    return [group[-1], *group[:-1]]


def steady(frames: int) -> list[float]:
    return [STEP_S * i for i in range(frames)]


def check_only(damaged, true, stamped, group):
    """The damaged frames are moved, and no other."""
    found, moved = placed(stamped, group=group)
    assert moved == len(damaged)
    assert all(a < b for a, b in pairwise(found))
    assert all(found[i] == true[i] for i in range(len(true)) if i not in damaged)


@settings(max_examples=100, deadline=None)
@given(
    before=st.integers(0, 200),
    run=st.integers(1, 125),
    after=st.integers(2, 200),
    leap_s=st.floats(HOLE_S + 125 * STEP_S, 1e6),
    group=st.integers(1, 4),
)
def test_stamps_that_leap_and_come_back_move_no_other_frame(before, run, after, leap_s, group):
    """One packet's, or those of all frames that share a time, as in a cluster of Matroska."""
    true = steady(before + run + after)
    damaged = range(before, before + run)
    check_only(damaged, true, [t + leap_s * (i in damaged) for i, t in enumerate(true)], group)


@settings(max_examples=100, deadline=None)
@given(
    before=st.integers(CLOCK_FRAMES, 100),
    run=st.integers(1, 100),
    after=st.integers(2, 100),
    every_s=st.floats(HOLE_S + 100 * STEP_S, 1e4),
    group=st.integers(1, 4),
)
def test_stamps_that_leap_ever_further_and_come_back_move_no_other_frame(before, run, after, every_s, group):
    """Those of a fragment of MP4 of which one field says how long all frames last: its holes are all alike."""
    true = steady(before + run + after)
    damaged = range(before, before + run)
    check_only(damaged, true, [t + every_s * (i - before + 1) * (i in damaged) for i, t in enumerate(true)], group)


@settings(max_examples=100, deadline=None)
@given(
    before=st.integers(CLOCK_FRAMES, 200),
    after=st.integers(round(CONFIRM_S / STEP_S) + 10, 400),
    hole_s=st.floats(HOLE_S + 1, 599.0),
    group=st.integers(1, 4),
)
def test_a_hole_in_a_recording_stays_as_it_is(before, after, hole_s, group):
    stamps = [t + hole_s * (i >= before) for i, t in enumerate(steady(before + after))]
    assert placed(stamps, group=group) == (stamps, 0)


@settings(max_examples=60, deadline=None)
@given(before=st.integers(1, 300), after=st.integers(1, 200), hole_s=st.floats(HOLE_S + 1, 1e6))
def test_a_hole_that_too_little_follows_is_closed_unless_a_declared_end_is_behind_it(before, after, hole_s):
    true = steady(before + after)
    stamps = [t + hole_s * (i >= before) for i, t in enumerate(true)]
    found, moved = placed(stamps)
    assert moved == 1
    assert found == pytest.approx(true)
    if hole_s < 3000:
        assert placed(stamps, end_s=stamps[-1]) == (stamps, 0)


@settings(max_examples=60, deadline=None)
@given(gaps=st.lists(st.floats(HOLE_S, 60.0), min_size=2, max_size=30))
def test_slow_pictures_have_many_holes(gaps):
    """None is much longer than the others: a shelf of slides, not a leap."""
    stamps = list(accumulate([0.0, *sorted(gaps, reverse=True)]))
    found, moved = placed(stamps)
    if all(a < 4 * b for a, b in pairwise(sorted(gaps, reverse=True))):
        assert (found, moved) == (stamps, 0)
    assert all(a < b for a, b in pairwise(found))


@settings(max_examples=100, deadline=None)
@given(
    run=st.integers(1, 125), after=st.integers(2, 200), leap_s=st.floats(HOLE_S + 125 * STEP_S, 1e6), one=st.booleans()
)
def test_a_stream_begins_where_the_clock_that_runs_on_would_have_begun(run, after, leap_s, one):
    true = steady(run + after)
    ahead = [t + leap_s * (i < run) for i, t in enumerate(true)]
    assert beginning_s(ahead[0], ahead[1:], STEP_S) == pytest.approx(0.0, abs=1e-6)
    # A packet that is damaged itself, and goes back alone, is no other clock.
    alone = [t - leap_s * one * (i == run) for i, t in enumerate(true)]
    assert beginning_s(alone[0], alone[1:], STEP_S) == 0.0


def test_what_is_held_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "AHEAD_PACKETS", 50)
    pulled = []

    def packets():
        for i in range(100_000):
            pulled.append(i)
            yield SimpleNamespace(size=1, at=0.0)

    ahead = PacketLookahead(packets(), lambda packet: None)
    assert [*ahead.times()] == [float("inf")]
    assert len(pulled) == 50
    assert next(iter(ahead)).size == 1


def stamps_in(data: bytes, kind: str) -> list[int]:
    """Where the bytes of time stamps are."""
    if kind == "ts":
        # PTS and DTS of packets of pictures.
        return [at.start() + n for at in re.finditer(rb"\x00\x00\x01\xe0", data) for n in range(9, 19)]
    if kind == "flv":
        found, at = [], 13
        while at < len(data) - 11:
            found += range(at + 4, at + 8)
            at += int.from_bytes(data[at + 1 : at + 4], "big") + 15
        return found
    clusters = [at.start() for at in re.finditer(rb"\x1f\x43\xb6\x75", data)]
    return [data.index(b"\xe7", at) + n for at in clusters for n in range(2, 4)]


@pytest.mark.parametrize("kind", ["ts", "flv", "mkv"])
def test_a_flipped_bit_of_a_stamp_repeats_at_most_a_couple_of_seconds(kind, write_clip, new_clip, tmp_path):
    """In files that declare no end; read on from any step, the same pictures come again."""
    mux = {"mkv": {"live": "1", "cluster_time_limit": "1000"}}.get(kind, {})
    clip = new_clip([40 * i for i in range(400)], suffix=kind, width=64, height=48, mux=mux)
    data = write_clip(clip, tmp_path / f"whole.{kind}").read_bytes()
    rng, spots = random.Random(kind), stamps_in(data, kind)
    damaged = 0
    for _ in range(16):
        flipped = bytearray(data)
        flipped[rng.choice(spots)] ^= 1 << rng.randrange(8)
        path = tmp_path / f"x.{kind}"
        path.write_bytes(flipped)
        with open_source(path) as source:
            times = [frame.time_s for frame in source.frames()]
            damaged += not source.damage.ok
            assert len(times) > 400 - 30
            assert max(b - a for a, b in pairwise([0.0, *times])) <= HOLE_S + 0.1
            assert times[-1] <= 16 + HOLE_S
            steps = list(read_steps(source, 2.0, 2))
            first = rng.randrange(1, len(steps))
            before = steps[first - 1]
            rest = read_steps(source, 2.0, 2, first, from_beginning=not before.damage.ok, mark=before.mark)
            assert [one.images.tobytes() for one in rest] == [one.images.tobytes() for one in steps[first:]]
    assert damaged > 2


SIZE = {"width": 64, "height": 48}
STAMPS = [40 * i for i in range(300)]


def changed(data: bytes, name: bytes, offset: int, value: int) -> bytes:
    """One byte of what has this name in the file, so many bytes behind the end of the name."""
    at = data.index(name) + len(name) + offset
    return data[:at] + bytes([value]) + data[at + 1 :]


# The file's suffix, how it is written, and one byte of a number that all its times hang on.
SCALES = {
    "scale of strh": ("avi", {}, (b"vids", 16, 129)),
    "high byte of it": ("avi", {}, (b"vids", 18, 1)),
    "TimestampScale": ("mkv", {}, (b"\x2a\xd7\xb1\x83", 0, 0x8F)),
    "TimestampScale, live": ("mkv", {"live": "1"}, (b"\x2a\xd7\xb1\x83", 0, 0xFF)),
    "Duration": ("mkv", {}, (b"\x44\x89\x88", 0, 0xC0)),
    "first cluster": ("mkv", {"cluster_time_limit": "2000"}, (b"\xe7\x83", 0, 0x7F)),
    "first cluster, live": ("mkv", {"live": "1", "cluster_time_limit": "2000"}, (b"\xe7\x83", 0, 0x7F)),
    "timescale of mdhd": ("mp4", {"use_editlist": "0"}, (b"mdhd", 14, 0x01)),
    "no mdhd": ("mp4", {"use_editlist": "0"}, (b"mdia", 7, 0)),
    "one delta for all": ("mp4", {"use_editlist": "0"}, (b"stts", 14, 0x22)),
}


@pytest.mark.parametrize("name", SCALES)
def test_a_damaged_scale_stretches_no_file(name, write_clip, new_clip, tmp_path):
    suffix, mux, where = SCALES[name]
    kind = {"ticks": [70_000 + t for t in STAMPS]}
    if suffix == "avi":
        kind = {"ticks": range(300), "base": Fraction(1, 25), "codec": "mpeg4"}
    path = write_clip(new_clip(suffix=suffix, mux=mux, options={"bf": "0"}, **kind, **SIZE), tmp_path / f"x.{suffix}")
    with open_source(path) as source:
        whole = list(read_steps(source, 2.0, 2))
        assert source.damage.ok
    path.write_bytes(changed(path.read_bytes(), *where))
    with open_source(path) as source:
        times = [frame.time_s for frame in source.frames()]
        assert source.damage.ok == (name == "Duration")
        assert times == pytest.approx([t / 1000 for t in STAMPS][: len(times)], abs=2e-3)
        assert len(times) > 270
        steps = list(read_steps(source, 2.0, 2))
        assert [one.images.tobytes() for one in steps] == [one.images.tobytes() for one in whole][: len(steps)]
        rest = read_steps(source, 2.0, 2, 5, from_beginning=not steps[4].damage.ok, mark=steps[4].mark)
        assert [one.images.tobytes() for one in rest] == [one.images.tobytes() for one in steps[5:]]


@pytest.mark.parametrize("suffix", ["avi", "mkv", "mp4"])
@pytest.mark.parametrize("every_s", [1, 5, 30])
def test_a_time_lapse_whose_headers_agree_keeps_its_clock(suffix, every_s, write_clip, new_clip, tmp_path):
    clip = new_clip(range(12), Fraction(every_s), suffix, options={"bf": "0"}, **SIZE)
    path = write_clip(clip, tmp_path / f"x.{suffix}")
    with open_source(path) as source:
        assert [frame.time_s for frame in source.frames()] == pytest.approx([every_s * i for i in range(12)], abs=2e-3)
        assert source.damage.ok
