"""Hostile and broken files: time stamps that jump, frames that are too large, streams that appear
in mid-file.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from protokv.errors import SourceUnreadable
from protokv.video import open_source, read_steps
from tests.video.conftest import Clip, MakeClip, number_in, write

ROOT = Path(__file__).parents[2]

STEADY = [40 * i for i in range(250)]


def test_time_stamps_that_jump_are_damage_and_make_no_hours_of_repeated_frames(
    tmp_path: Path,
) -> None:
    clip = Clip([70_000 + t for t in STEADY], suffix="mkv", mux={"cluster_time_limit": "2000"})
    path = write(clip, tmp_path / "x.mkv")
    data = bytearray(path.read_bytes())
    clusters = [i for i in range(len(data)) if data[i : i + 4] == b"\x1f\x43\xb6\x75"]
    # The highest byte of the time of one cluster: its frames are hours later, the next are right.
    data[data.index(b"\xe7\x83", clusters[2]) + 2] ^= 0x40
    path.write_bytes(data)
    with open_source(path) as source:
        frames = list(source.frames())
        # Frames with such a stamp are placed by their order.
        assert [number_in(frame.image) for frame in frames] == list(range(250))
        assert [frame.time_s for frame in frames] == pytest.approx(
            [i / 25 for i in range(250)], abs=1e-6
        )
        assert (source.damage.frames_damaged, source.damage.frames_lost) == (1, 0)
        assert "jump" in source.damage.message
        assert list(read_steps(source, 2.0, 2))[-1].time_s <= 11.0


def test_a_stream_that_claims_huge_frames_inside_takes_no_memory(tmp_path: Path) -> None:
    pytest.importorskip("resource")
    path = write(
        Clip([0, 40, 80], suffix="mkv", codec="libvpx", options={"deadline": "realtime"}),
        tmp_path / "x.mkv",
    )
    data = bytearray(path.read_bytes())
    # A VP8 key frame carries its size after its start code, 14 bits each.
    at = data.index(b"\x9d\x01\x2a") + 3
    data[at : at + 4] = 2 * (16383).to_bytes(2, "little")
    path.write_bytes(data)
    printed, grown_mib = read_apart(path)
    assert printed != "3"
    assert grown_mib < 150


def read_apart(path: Path, *, piped: bool = False) -> tuple[str, int]:
    """Read a file in a process of its own; return what it printed, and MiB of memory it took."""
    code = (
        "import sys; from protokv.video import open_source; from protokv.errors import "
        "SourceError\n"
        "from tests.peak import peak_kib; import protokv.video.av_source\n"
        "before = peak_kib()\n"
        "try:\n"
        "    with open_source(sys.argv[1]) as source: print(len([f.image for f in "
        "source.frames()]))\n"
        "except SourceError as error: print(error.message)\n"
        "print((peak_kib() - before) >> 10)"
    )
    command = [sys.executable, "-c", code, "-" if piped else str(path)]
    with path.open("rb") as file:
        out = subprocess.run(
            command, stdin=file, capture_output=True, text=True, check=True, cwd=ROOT
        )
    printed, grown_mib = out.stdout.splitlines()
    return printed, int(grown_mib)


def declare_samples(path: Path, form: str) -> None:
    """Write an MP4 that declares thousands of millions of samples."""
    mux = {"movflags": "frag_keyframe+empty_moov"} if form == "fragments" else {}
    data = bytearray(write(Clip([0, 40, 80], mux=mux), path).read_bytes())
    counts = {"trun": 8} if form == "fragments" else {"stsz": 12, "stts": 12, "stsc": 16}
    for box, after in counts.items():
        at = data.index(box.encode()) + after
        data[at : at + 4] = (2_000_000_000).to_bytes(4, "big")
    path.write_bytes(data)


@pytest.mark.parametrize("form", ["plain", "fragments"])
@pytest.mark.parametrize("piped", [False, True])
def test_an_mp4_that_declares_more_samples_than_it_can_hold_takes_no_memory(
    piped: bool, form: str, tmp_path: Path
) -> None:
    pytest.importorskip("resource")
    declare_samples(tmp_path / "x.mp4", form)
    printed, grown_mib = read_apart(tmp_path / "x.mp4", piped=piped)
    assert not printed.isdecimal()
    assert grown_mib < 50


@pytest.mark.parametrize(
    "broken",
    [
        "av.open",
        "protokv.video.av_source.probe_stream",
        "protokv.video.av_source.convert_frame_to_rgb",
    ],
)
def test_an_error_while_opening_or_converting_is_a_source_error(
    broken: str, make_clip: MakeClip, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_clip("constant rate")

    def fail(*_: object, **__: object) -> None:
        raise IndexError("out of range")

    monkeypatch.setattr(broken, fail)
    with pytest.raises(SourceUnreadable, match="out of range"), open_source(path) as source:
        _ = next(source.frames()).image
