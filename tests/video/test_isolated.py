"""A source in a process of its own gives the same frames, and the death of that process is only damage."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from protokv.errors import SourceNotFound, SourceUnreadable
from protokv.video import open_source, read_steps
from protokv.video.isolated import IsolatedSource
from tests.video.conftest import number_in

OPENER = "tests.video.doubles:by_name"


def double(deed: str, at: int, **more):
    return IsolatedSource("double", opener=OPENER, deed=deed, at=at, **more)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("name", ["variable rate", "turned", "late start", "one frame"])
def test_steps_and_damage_are_those_of_a_reading_without_a_process(name, make_clip):
    with open_source(make_clip(name)) as plain, IsolatedSource(make_clip(name)) as isolated:
        assert isolated.info == plain.info
        for fps in (0.7, 29.97):
            whole = list(read_steps(plain, fps, 2))
            for first in {0, len(whole) // 2, len(whole) - 1}:
                for a, b in zip(whole[first:], read_steps(isolated, fps, 2, first_index=first), strict=True):
                    assert (a.index, a.time_s, a.decoders) == (b.index, b.time_s, b.decoders)
                    assert np.array_equal(a.images, b.images)
            assert isolated.damage == plain.damage


def test_damage_crosses_the_border(make_clip, tmp_path):
    data = make_clip("matroska in milliseconds").read_bytes()
    (tmp_path / "x.mkv").write_bytes(data[: len(data) * 2 // 3])
    with open_source(tmp_path / "x.mkv") as plain, open_source(tmp_path / "x.mkv", isolate=True) as isolated:
        assert len(list(plain.frames())) == len(list(isolated.frames()))
        assert not plain.damage.ok
        assert isolated.damage == plain.damage


def test_errors_of_opening_keep_their_kind_and_words(tmp_path):
    with pytest.raises(SourceNotFound, match=r"no\.mp4") as caught:
        IsolatedSource(tmp_path / "no.mp4")
    assert caught.value.hint
    with pytest.raises(SourceUnreadable, match="double cannot"):
        double("refuse", -1)


@pytest.mark.parametrize(
    ("deed", "why"),
    [
        ("crash", "signal 11"),
        ("hang", "sign of life"),
        # Only Linux keeps limits of the address space.
        pytest.param(
            "hog", "the decoder died", marks=pytest.mark.skipif(sys.platform != "linux", reason="not on this system")
        ),
    ],
)
def test_a_decoder_that_dies_hangs_or_takes_too_much_memory_loses_no_frame_that_it_gave(deed, why):
    with double(deed, 42, stall_s=2.0) as source:
        frames = list(source.frames())
        assert [round(f.time_s * 10) for f in frames] == list(range(42))
        assert source.damage.frames_lost == 59
        assert source.damage.lost_from_s == pytest.approx(4.1)
        assert why in source.damage.message
        # The source can be read again, in a new process.
        assert len(list(source.frames(3.0))) == 12


@pytest.mark.parametrize(("deed", "why", "at"), [("hang", "sign of life", -1), ("crash", "signal 11", 0)])
def test_a_decoder_that_dies_or_hangs_before_its_first_frame_is_a_source_error(deed, why, at):
    with pytest.raises(SourceUnreadable, match=why), double(deed, at, stall_s=2.0) as source:
        list(source.frames())


def test_text_that_a_library_prints_is_not_taken_for_frames():
    with double("chatter", 3) as source:
        assert len(list(source.frames())) == 100
        assert source.damage.ok


def test_a_reader_that_waits_for_a_frame_can_be_stopped():
    with double("hang", 5) as source:
        seen = []
        for frame in source.frames(should_stop=lambda: len(seen) == 5):
            seen.append(frame)
        assert len(seen) == 5
        assert source.damage.ok


def test_a_new_reading_begins_anew_while_another_is_under_way(make_clip):
    with IsolatedSource(make_clip("constant rate")) as source:
        first = source.frames()
        assert number_in(next(first).image) == 0
        assert [number_in(f.image) for f in source.frames(1.0)] == list(range(25, 61))
        assert list(first) == []


def test_the_process_ends_with_the_source_and_with_its_parent(tmp_path):
    def pid() -> int:
        return int((tmp_path / "pid").read_text())

    source = double("hang", 5, pid_file=str(tmp_path / "pid"))
    next(source.frames())
    source.close()
    assert gone(pid())
    code = (
        "import sys, os; from tests.video.test_isolated import double\n"
        "source = double('hang', 5, pid_file=sys.argv[1]); next(source.frames()); os.kill(os.getpid(), 9)"
    )
    out = subprocess.run([sys.executable, "-c", code, str(tmp_path / "pid")], capture_output=True, check=False)
    assert out.returncode == -signal.SIGKILL, out.stderr
    until = time.monotonic() + 60
    while not gone(pid()):
        assert time.monotonic() < until
