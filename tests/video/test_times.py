"""Times of files and pipes alike: raw streams, joins, long pauses, and one origin for pictures and
text tracks.
"""

from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import av
import pytest

from protokv.texts import Keywords
from protokv.video import Source, open_source
from protokv.video.source import SourceSlice
from tests.conftest import slow, wide
from tests.video.conftest import STEADY, Clip, join, number_in, remux, write
from tests.video.test_stream import piped
from tests.words.subtitled import write_subtitled


def read_both(path: Path) -> Iterator[tuple[list[float], list[int], Source]]:
    """Read a file, and the same bytes from a pipe: times and numbers of the frames, and the
    source.
    """
    with (
        piped(path.read_bytes()) as address,
        open_source(path) as file,
        open_source(address) as pipe,
    ):
        for source in (file, pipe):
            frames = list(source.frames())
            assert len({one.image.shape for one in frames}) == 1
            yield [one.time_s for one in frames], [number_in(one.image) for one in frames], source


@pytest.mark.parametrize(
    ("codec", "rate"), [("libx264", 8), ("libx264", 50), ("libx265", 25), ("mjpeg", 25)]
)
def test_a_raw_stream_has_the_rate_that_it_states_and_no_damage(
    codec: str, rate: int, tmp_path: Path
) -> None:
    form = {"libx264": "h264", "libx265": "hevc"}.get(codec, codec)
    options = {"x265-params": "log-level=none"} if codec == "libx265" else {}
    pixels = "yuvj420p" if codec == "mjpeg" else "yuv420p"
    clip = Clip(range(40), Fraction(1, rate), form, codec, pixels, options=options)
    for times, numbers, source in read_both(write(clip, tmp_path / f"x.{form}")):
        assert numbers == list(range(40))
        assert times == pytest.approx([i / rate for i in range(40)])
        assert source.info.rate_fps == pytest.approx(rate)
        assert source.damage.ok
        assert codec == "mjpeg" or source.notes == (
            f"it has no times: {rate} frames a second are assumed",
        )


@pytest.mark.parametrize(
    ("suffix", "parts", "audio_s"),
    [("ts", 3, 0.0), ("ts", 3, 2.44), ("mkv", 2, 0.0)],
)
def test_recordings_with_the_same_clock_that_were_joined_go_on_and_say_so(
    suffix: str, parts: int, audio_s: float, tmp_path: Path
) -> None:
    path = write(Clip(STEADY, suffix=suffix, audio_s=audio_s), tmp_path / f"a.{suffix}")
    joined = tmp_path / f"b.{suffix}"
    joined.write_bytes(path.read_bytes() * parts)
    for times, numbers, source in read_both(joined):
        assert numbers == list(range(61)) * parts
        assert [b - a for a, b in pairwise(times)] == pytest.approx(
            [0.04] * (61 * parts - 1), abs=2e-3
        )
        assert source.damage.ok
        begins = [f"at {time_s:.2f} s another" for time_s in times[61::61]]
        assert all(begin in note for begin, note in zip(begins, source.notes, strict=True))


X265 = {"codec": "libx265", "options": {"x265-params": "log-level=none"}}
PLAIN: Keywords = {"options": {"bf": "0"}}
OTHER_PID = {"mux": {"mpegts_start_pid": "300"}}
OTHER_PROGRAM = {"mux": {"mpegts_service_id": "7", "mpegts_start_pid": "300"}}
# What follows a recording of H.264 on PID 256
CHANGES: dict[str, list[Keywords]] = {
    "pid with sound": [PLAIN | OTHER_PID | {"audio_s": 2.0}],
    "table": [PLAIN | {"mux": {"mpegts_pmt_start_pid": "4242", "mpegts_start_pid": "300"}}],
    "size": [PLAIN | {"width": 64, "height": 48}],
    "codec and size": [X265 | {"width": 160}],
    "MPEG-2": [{"codec": "mpeg2video", "base": Fraction(1, 25)}],
    "three programs": [PLAIN | OTHER_PROGRAM, X265],
    "pid and back": [PLAIN | OTHER_PID, PLAIN],
    "codec and pid, back and on": [X265 | OTHER_PROGRAM, PLAIN, X265 | OTHER_PROGRAM],
}
LONG = (150,) * 4


@pytest.mark.parametrize(
    ("change", "sizes", "goes_on"),
    [
        ("pid with sound", LONG, True),
        ("size", LONG, False),
        ("pid and back", (40, 40, 40), False),
        ("pid and back", (150, 4, 20), False),
        *wide(
            ("codec and size", LONG, True),
            ("MPEG-2", LONG, True),
            ("three programs", LONG, True),
            ("codec and pid, back and on", LONG, True),
            ("pid and back", (150, 4, 20), True),
        ),
        *slow(("table", LONG, True), ("pid and back", (40, 40, 40), True)),
    ],
)
def test_a_recording_that_changes_its_pid_codec_or_program_goes_on(
    change: str, sizes: tuple[int, ...], goes_on: bool, tmp_path: Path
) -> None:
    """FFmpeg has not read the next one when it looks at one of six seconds. Pictures of a short one
    are in the bytes that it reads before it names the streams.
    """
    parts = [PLAIN, *CHANGES[change]]
    sizes = sizes[: len(parts)]
    clips = []
    for n, how in enumerate(parts):
        step = 40 * how.get("base", Fraction(1, 1000)).denominator // 1000
        begin = sum(sizes[:n]) * goes_on
        clips.append(Clip([step * (begin + i) for i in range(sizes[n])], suffix="ts", **how))
    for times, numbers, source in read_both(join(tmp_path, *clips)):
        assert times[-1] == pytest.approx(0.04 * sum(sizes), abs=0.2)
        # A decoder of before may lose its last picture.
        assert len(numbers) > sum(sizes) - len(sizes)
        found = "".join(map(chr, numbers))
        for frames in sizes:
            assert found.count("".join(map(chr, range(frames - 2)))) >= sizes.count(frames)
        assert source.damage.ok
        joins = [note for note in source.notes if "another recording is joined" in note]
        assert len(joins) == len(parts) - 1


def test_recordings_whose_sound_has_the_pid_of_the_pictures_before_are_watched(
    tmp_path: Path,
) -> None:
    frames = 150
    clips = []
    for n in range(3):
        ticks = [40 * (frames * n + i) for i in range(frames)]
        pids = (256, 257) if n % 2 == 0 else (257, 256)
        clips.append(Clip(ticks, suffix="ts", audio_s=6.0, pids=pids, **PLAIN))
    for _, numbers, _ in read_both(join(tmp_path, *clips)):
        # Sound that is still to come is taken for pictures, and may hide the first ones.
        found = "".join(map(chr, numbers))
        assert found.count("".join(map(chr, range(30, frames - 2)))) == 3


PAUSES = {
    "a pause of 90 minutes": [*STEADY, *(5_400_000 + t for t in STEADY)],
    "slides": [0, 1_200_000, 2_400_000, 3_700_000, 5_000_000],
}


@pytest.mark.parametrize("suffix", ["ts", "mkv", "mp4", "parts.mp4"])
@pytest.mark.parametrize("name", PAUSES)
def test_a_long_pause_stays_as_it_is(name: str, suffix: str, tmp_path: Path) -> None:
    mux = {"movflags": "frag_keyframe+empty_moov"} if suffix == "parts.mp4" else {}
    clip = Clip(PAUSES[name], suffix=suffix, options={"bf": "0"}, mux=mux)
    for times, _, source in read_both(write(clip, tmp_path / f"x.{suffix}")):
        assert times == pytest.approx(clip.times_s, abs=0.05)
        assert source.damage.ok
        assert source.notes == ()


@pytest.mark.parametrize("flags", ["frag_keyframe+empty_moov", "frag_every_frame+empty_moov"])
def test_a_header_that_states_no_ticks_of_a_second_is_damage_and_no_hours(
    flags: str, tmp_path: Path
) -> None:
    clip = Clip(STEADY, options={"bf": "0"}, mux={"movflags": flags})
    path = write(clip, tmp_path / "x.mp4")
    data = bytearray(path.read_bytes())
    ticks = data.index(b"mdhd") + 16
    data[ticks : ticks + 4] = bytes(4)
    path.write_bytes(data)
    with open_source(path) as source:
        assert max(frame.time_s for frame in source.frames()) <= len(STEADY)
        assert not source.damage.ok


def test_hidden_frames_of_vp9_are_not_awaited(tmp_path: Path) -> None:
    """Encoders on chips put them into packets of their own, with times of their own."""

    def add_hidden(number: int, packet: av.Packet) -> list[av.Packet]:
        if number:
            return [packet]
        # The key frame again, without its bit show_frame.
        data = bytes(packet)
        hidden = av.Packet(bytes([data[0] & ~2]) + data[1:])
        hidden.pts = hidden.dts = packet.pts + 20
        hidden.time_base = packet.time_base
        return [packet, hidden]

    clip = Clip(STEADY, suffix="webm", codec="libvpx-vp9", options={"cpu-used": "8"})
    path = write(clip, tmp_path / "a.webm")
    remux(path, tmp_path / "b.webm", add_hidden, fflags="-autobsf")
    for times, numbers, source in read_both(tmp_path / "b.webm"):
        assert (len(times), numbers[-1]) == (61, 60)
        assert source.damage.ok


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "ts"])
def test_pictures_that_begin_late_begin_late_and_words_keep_their_distance(
    suffix: str, tmp_path: Path
) -> None:
    """As in players, stream time begins with the sound; a file of words beside the video counts
    from there.
    """
    path = write(
        Clip([5000 + 40 * i for i in range(50)], suffix=suffix, audio_s=7.0),
        tmp_path / f"x.{suffix}",
    )
    with open_source(path) as source:
        # Encoders of sound begin up to 0.13 s early.
        first, *_, last = (frame.time_s for frame in source.frames())
        assert (first, last - first) == (pytest.approx(5.0, abs=0.15), pytest.approx(49 / 25))
        assert source.info.duration_s == pytest.approx(first + 2.0, abs=0.2)
        assert source.damage.ok
        assert next(source.frames(5.5)).time_s == pytest.approx(5.5, abs=0.05)


SAID = [
    (0.4, 1.2, "x < y"),
    (2.0, 3.5, "two\\Nrows {\\i1}here{\\i0}"),
    (4.0, 5.0, "{\\p1}m 0 0 l 1 1{\\p0}"),
]


@pytest.mark.parametrize(
    ("suffix", "codec", "late_ms"),
    [("mp4", "mov_text", 700), ("mkv", "ass", 3000), ("webm.mkv", "webvtt", 0)],
)
def test_a_track_has_equal_lines_in_every_container(
    suffix: str, codec: str, late_ms: int, tmp_path: Path
) -> None:
    said = SAID if codec == "ass" else SAID[1:2]
    path = write_subtitled(
        tmp_path / f"x.{suffix}", {"eng": said, "deu": said[:1]}, codec, late_ms=late_ms
    )
    with open_source(path) as source, SourceSlice(open_source(path), 1.0) as part:
        assert source.texts == part.texts
        assert [one.language for one in source.texts] == ["eng", "deu"]
        number = source.texts[0].number
        lines, lost, _ = source.lines(number)
        assert not lost
        # The video begins late_ms after its words, or both begin where the container does.
        late_s = next(source.frames()).time_s
        assert late_s == pytest.approx(0.7 if suffix == "mp4" else 0.0)
        lines = tuple(line.shift(-late_s) for line in lines)
        assert [line[:2] for line in lines] == [pytest.approx(one[:2]) for one in said[:2]]
        assert "two\nrows" in lines[-1].text
        assert codec != "ass" or lines[0].text == "x &lt; y"
        assert [line.start_s for line in part.lines(number).lines] == pytest.approx(
            [one[0] - 1 + late_s for one in said[:2]]
        )


def test_webvtt_of_mkvtoolnix_is_read_and_a_track_that_gives_no_line_says_so(
    tmp_path: Path,
) -> None:
    said = [(2.0, 3.5, "two\\Nrows QDTG1")]
    path = write_subtitled(tmp_path / "x.mkv", {"eng": said}, "webvtt")
    # FFmpeg does not know this name, under which packets are bare text; names may end in bytes of
    # 0. What stands behind one in a packet is not said.
    data = path.read_bytes().replace(b" QDTG1", b"\0QDTG1")
    path.write_bytes(data.replace(b"D_WEBVTT/SUBTITLES", b"S_TEXT/WEBVTT".ljust(18, b"\0")))
    with open_source(path) as source:
        assert [(one.codec, one.language) for one in source.texts] == [("webvtt", "eng")]
        (line,), lost, _ = source.lines(source.texts[0].number)
    assert (line[:2], lost) == (pytest.approx((2.0, 3.5)), "")
    assert line.text == "two\nrows"
    path = write_subtitled(tmp_path / "drawn.mkv", {"eng": SAID[2:]}, "ass")
    with open_source(path) as source:
        assert source.lines(source.texts[0].number) == ((), "none of its 1 packets holds text", "")
