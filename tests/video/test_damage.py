"""Damaged files: every readable frame is given, every lost one is counted and dated."""

from pathlib import Path

import av
import pytest

from protokv.video import open_source, read_steps
from protokv.video.registry import Decoder
from tests.conftest import wide
from tests.video.conftest import DECODERS, Clip, MakeClip, join, number_in, remux, write
from tests.video.test_times import read_both


def with_rubbish(source: Path, target: Path, number: int) -> Path:
    """Write a copy whose packet `number`, in decoding order, is rubbish."""

    def spoil(at: int, packet: av.Packet) -> list[av.Packet]:
        if at == number:
            packet.update(b"\xff" * packet.size)
        return [packet]

    return remux(source, target, spoil)


# A JPEG without pixels would show old memory of the decoder.
@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize(
    ("name", "number", "most"),
    [
        ("constant rate", 12, 12),  # a key frame; the next is number 24
        ("constant rate", 13, 1),
        ("constant rate", 60, 1),
        ("every frame a key frame", 30, 1),
    ],
)
def test_a_packet_of_rubbish_loses_the_frames_that_need_it_and_says_when(
    decoder: Decoder, name: str, number: int, most: int, make_clip: MakeClip, tmp_path: Path
) -> None:
    clip = make_clip(name)
    path = with_rubbish(clip, tmp_path / f"x{clip.suffix}", number)
    with open_source(path, decoder) as source:
        frames = [(f.time_s, number_in(f.image)) for f in source.frames()]
        damage = source.damage
        assert 1 <= damage.frames_lost == 61 - len(frames) <= most
        assert number * 0.04 not in [round(t, 6) for t, _ in frames]
        assert [n for t, n in frames if t < number * 0.04 - 0.02] == list(range(number))
        rest = [n for n in range(24, 61) if n != number]
        assert [n for t, n in frames if t > 24 * 0.04 - 0.02] == rest
        assert damage.lost_from_s == pytest.approx(number * 0.04)
        assert f"{number * 0.04:.2f} s" in damage.message
        # A reading that begins later counts only what is lost from there on.
        list(source.frames(number * 0.04 - 0.2))
        assert source.damage.frames_lost == damage.frames_lost
        if number < 60:
            list(source.frames(2.2))
            assert source.damage.ok


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize(
    ("suffix", "mux", "part", "unsure"),
    [("mp4", {"movflags": "faststart"}, 0.6, 0), ("mkv", {}, 0.8, 2)],
)
def test_a_file_cut_short_gives_its_beginning_and_names_its_missing_end(
    decoder: Decoder, suffix: str, mux: dict[str, str], part: float, unsure: int, tmp_path: Path
) -> None:
    clip = Clip([40 * i for i in range(100)], suffix=suffix, mux=mux)
    path = write(clip, tmp_path / f"x.{suffix}")
    data = path.read_bytes()
    path.write_bytes(data[: round(len(data) * part)])
    with open_source(path, decoder) as source:
        frames = list(source.frames())
        damage = source.damage
        assert [number_in(f.image) for f in frames[:-1]] == list(range(len(frames) - 1))
        assert 0 < len(frames) < 100
        assert damage.frames_lost == pytest.approx(100 - len(frames), abs=unsure)
        assert damage.lost_from_s == pytest.approx(frames[-1].time_s + 0.04, abs=0.1)
        # Steps stop with the pictures: nothing is made up for the missing end.
        assert list(read_steps(source, 25.0, 1))[-1].time_s == pytest.approx(frames[-1].time_s)


@pytest.mark.parametrize(
    ("codec", "options"),
    [
        ("libx264", {"sc_threshold": "0", "bf": "0"}),
        *wide(("libx265", {"x265-params": "keyint=40:min-keyint=40:scenecut=0:log-level=none"})),
    ],
)
def test_pictures_before_the_first_key_frame_are_lost_in_a_file_and_in_a_pipe(
    codec: str, options: dict[str, str], tmp_path: Path
) -> None:
    clip = Clip([40 * i for i in range(90)], suffix="ts", codec=codec, gop=40, options=options)
    path = write(clip, tmp_path / "x.ts")
    data = path.read_bytes()
    path.write_bytes(data[188 * (len(data) // 188 // 6) :])
    for _, numbers, source in read_both(path):
        assert numbers == list(range(numbers[0], 90))
        assert numbers[0] in (40, 80)
        assert source.damage.frames_lost == pytest.approx(numbers[0] - 15, abs=10)
        assert source.damage.lost_from_s == pytest.approx(0.0, abs=0.1)


def count_on(data: bytearray) -> None:
    """Let the counters of the packets of joined MPEG-TS go on."""
    last = dict[int, int]()
    for at in range(0, len(data), 188):
        pid = (data[at + 1] & 31) << 8 | data[at + 2]
        if data[at + 3] & 0x10:
            last[pid] = (last.get(pid, -1) + 1) & 15
            data[at + 3] = data[at + 3] & 0xF0 | last[pid]


@pytest.mark.parametrize(
    ("gap_ms", "counters_go_on"),
    [
        (0, False),
        (200, False),
        (1000, True),
        (900_000, True),
        *wide((40, False), (5000, False), (60_000, False), (0, True), (120, True), (9000, True)),
    ],
)
def test_a_recording_that_goes_on_is_a_join_and_a_part_that_lacks_is_missing(
    gap_ms: int, counters_go_on: bool, tmp_path: Path
) -> None:
    """Where counters begin anew, FFmpeg marks a packet before the join as corrupt. Where they go
    on, what is longer than a segment is a pause.
    """
    begins_ms = (40, 2040 + gap_ms)
    ticks = [[begin + 40 * i for i in range(50)] for begin in begins_ms]
    path = join(tmp_path, *(Clip(one, suffix="ts", options={"bf": "0"}) for one in ticks))
    if counters_go_on:
        count_on(data := bytearray(path.read_bytes()))
        path.write_bytes(data)
    missing_ms = 0 if counters_go_on and gap_ms > 60_000 else gap_ms
    for times, numbers, source in read_both(path):
        assert numbers == 2 * list(range(50))
        assert times[50] - times[49] == pytest.approx(0.04 + gap_ms / 1000, abs=0.01)
        assert source.damage.frames_lost == pytest.approx(missing_ms / 40, abs=1)
        said = f"{gap_ms / 1000:.3g} s are missing" in source.damage.message
        assert said is (missing_ms > 0)
        joined = any("at 2.00 s another recording is joined" in one for one in source.notes)
        assert joined is (gap_ms == 0 and not counters_go_on)
