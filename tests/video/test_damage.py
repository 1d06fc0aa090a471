"""Damaged files: every readable frame is given, every lost one is counted and dated."""

from fractions import Fraction
from pathlib import Path

import av
import pytest

from protokv.video import open_source, read_steps
from protokv.video.registry import Decoder
from tests.conftest import widen
from tests.video.conftest import DECODERS, Clip, MakeClip, number_in, write
from tests.video.test_stream import piped


def with_rubbish(source: Path, target: Path, number: int) -> Path:
    """Write a copy whose packet `number`, in decoding order, is rubbish."""
    with av.open(str(source)) as original, av.open(str(target), "w") as copy:
        stream = original.streams.video[0]
        out = copy.add_stream_from_template(stream)
        for i, packet in enumerate(p for p in original.demux(stream) if p.size):
            if i == number:
                packet.update(b"\xff" * packet.size)
            packet.stream = out
            copy.mux(packet)
    return target


# A JPEG without pixels would show old memory of the decoder.
@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize(
    ("name", "number"), [("constant rate", 13), ("constant rate", 60), ("jpeg", 30)]
)
def test_one_packet_of_rubbish_loses_one_frame_and_says_when(
    decoder: Decoder, name: str, number: int, make_clip: MakeClip, tmp_path: Path
) -> None:
    clip = make_clip("every frame a key frame" if name == "jpeg" else name)
    path = with_rubbish(clip, tmp_path / f"x{clip.suffix}", number)
    with open_source(path, decoder) as source:
        frames = [(f.time_s, number_in(f.image)) for f in source.frames()]
        damage = source.damage
        assert len(frames) == 60
        assert number * 0.04 not in [round(t, 6) for t, _ in frames]
        assert [n for t, n in frames if t < number * 0.04 - 0.02] == list(range(number))
        assert (damage.frames_lost, damage.lost_from_s) == (1, pytest.approx(number * 0.04))
        assert f"{number * 0.04:.2f} s" in damage.message
        # A reading that begins later counts only what is lost from there on.
        list(source.frames(number * 0.04 - 0.2))
        assert source.damage.frames_lost == 1
        if number < 60:
            list(source.frames(2.2))
            assert source.damage.ok


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_lost_key_frame_loses_the_frames_that_need_it_and_reading_goes_on(
    decoder: Decoder, make_clip: MakeClip, tmp_path: Path
) -> None:
    path = with_rubbish(make_clip("constant rate"), tmp_path / "x.mp4", 12)
    with open_source(path, decoder) as source:
        frames = [(f.time_s, number_in(f.image)) for f in source.frames()]
        assert 1 <= source.damage.frames_lost == 61 - len(frames)
        assert source.damage.lost_from_s == pytest.approx(12 * 0.04)
    assert [n for t, n in frames if t > 24 * 0.04 - 0.02] == list(range(24, 61))


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize(("kind", "part"), [("mp4", 0.35), ("mkv", 0.8)])
def test_a_file_cut_short_gives_its_beginning_and_names_its_missing_end(
    decoder: Decoder, kind: str, part: float, tmp_path: Path
) -> None:
    clip = Clip(
        [40 * i for i in range(100)],
        mux={"movflags": "faststart"} if kind == "mp4" else {},
        suffix=kind,
    )
    path = write(clip, tmp_path / f"x.{kind}")
    data = path.read_bytes()
    begin = data.find(b"mdat") if kind == "mp4" else 600
    path.write_bytes(data[: begin + round((len(data) - begin) * part)])
    with open_source(path, decoder) as source:
        frames = list(source.frames())
        damage = source.damage
        assert [number_in(f.image) for f in frames[:-1]] == list(range(len(frames) - 1))
        assert 0 < len(frames) < 100
        assert damage.frames_lost == pytest.approx(100 - len(frames), abs=0 if kind == "mp4" else 2)
        assert damage.lost_from_s == pytest.approx(frames[-1].time_s + 0.04, abs=0.1)
        # Steps stop with the pictures: nothing is made up for the missing end.
        assert [s.time_s for s in read_steps(source, 25.0, 1)][-1] == pytest.approx(
            frames[-1].time_s
        )
        # Resuming counts the same end, once.
        list(source.frames(0.2))
        assert source.damage.frames_lost == pytest.approx(damage.frames_lost, abs=2)


MIDDLE = {
    "h264": Clip(
        [40 * i for i in range(90)], suffix="ts", gop=40, options={"sc_threshold": "0", "bf": "0"}
    ),
    "hevc": Clip(
        [40 * i for i in range(90)],
        suffix="ts",
        codec="libx265",
        options={"x265-params": "keyint=40:min-keyint=40:scenecut=0:log-level=none"},
    ),
    "mpeg2": Clip(range(90), Fraction(1, 25), "ts", "mpeg2video", gop=40),
}


@pytest.mark.parametrize("codec", MIDDLE)
def test_pictures_before_the_first_key_frame_are_lost_in_a_file_and_in_a_pipe(
    codec: str, tmp_path: Path
) -> None:
    data = write(MIDDLE[codec], tmp_path / "whole.ts").read_bytes()
    (tmp_path / "x.ts").write_bytes(data[188 * (len(data) // 188 // 6) :])
    with piped((tmp_path / "x.ts").read_bytes()) as address:
        for one in (tmp_path / "x.ts", address):
            with open_source(one) as source:
                numbers = [number_in(frame.image) for frame in source.frames()]
                assert numbers == list(range(numbers[0], 90))
                assert numbers[0] in (40, 80)
                assert source.damage.frames_lost == pytest.approx(numbers[0] - 15, abs=10)
                assert source.damage.lost_from_s == pytest.approx(0.0, abs=0.1)


def write_part(path: Path, from_ms: int, frames: int) -> bytes:
    ticks = [from_ms + 40 * i for i in range(frames)]
    return write(Clip(ticks, suffix="ts", options={"bf": "0"}), path).read_bytes()


@pytest.mark.parametrize("gap_ms", widen([0, 40, 200, 1000, 5000, 60_000], (0, 200)))
def test_a_recording_that_goes_on_is_a_join_and_a_part_that_lacks_is_missing(
    gap_ms: int, tmp_path: Path
) -> None:
    """Their counters begin anew, so FFmpeg marks a packet before the join as corrupt."""
    first = write_part(tmp_path / "a.ts", 40, 50)
    later = write_part(tmp_path / "b.ts", 40 + 2000 + gap_ms, 50)
    (tmp_path / "x.ts").write_bytes(first + later)
    with piped((tmp_path / "x.ts").read_bytes()) as address:
        for one in (tmp_path / "x.ts", address):
            with open_source(one) as source:
                frames = list(source.frames())
                assert [number_in(frame.image) for frame in frames] == 2 * list(range(50))
                assert frames[50].time_s - frames[49].time_s == pytest.approx(
                    0.04 + gap_ms / 1000, abs=0.01
                )
                if gap_ms:
                    assert source.damage.frames_lost == pytest.approx(gap_ms / 40, abs=1)
                    assert f"{gap_ms / 1000:g} s are missing" in source.damage.message
                else:
                    assert source.damage.ok
                    assert "at 2.00 s another recording is joined" in source.notes[0]


def count_on(parts: list[bytes]) -> bytes:
    """Join MPEG-TS so that the counters of its packets go on."""
    data = bytearray(b"".join(parts))
    last = dict[int, int]()
    for at in range(0, len(data), 188):
        pid = (data[at + 1] & 31) << 8 | data[at + 2]
        if data[at + 3] & 0x10:
            last[pid] = (last.get(pid, -1) + 1) & 15
            data[at + 3] = data[at + 3] & 0xF0 | last[pid]
    return bytes(data)


@pytest.mark.parametrize("gap_ms", widen([0, 120, 1000, 2000, 9000, 900_000], (1000, 900_000)))
def test_a_part_is_missing_although_the_counters_go_on(gap_ms: int, tmp_path: Path) -> None:
    """A pause may be as short where frames come as they like, or longer than a segment is."""
    parts = [write_part(tmp_path / "a.ts", 40, 50)]
    parts.append(write_part(tmp_path / "b.ts", 40 + 2000 + gap_ms, 50))
    (tmp_path / "x.ts").write_bytes(count_on(parts))
    missing = 0 < gap_ms < 60_000
    with piped((tmp_path / "x.ts").read_bytes()) as address:
        for one in (tmp_path / "x.ts", address):
            with open_source(one) as source:
                assert len(list(source.frames())) == 100
                assert source.damage.frames_lost == pytest.approx(missing * gap_ms / 40, abs=1)
                said = f"{gap_ms / 1000:.3g} s are missing" in source.damage.message
                assert said is missing
