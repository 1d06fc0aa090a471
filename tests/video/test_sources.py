"""The contract of file sources, for both decoders and every container; and of their parts."""

import os
import sys
import wave
from dataclasses import replace
from functools import partial
from importlib.metadata import EntryPoint, EntryPoints
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from protokv.errors import ConfigError, SourceNotFound, SourceUnreadable
from protokv.video import Source, open_source, read_steps
from protokv.video.registry import Decoder
from protokv.video.source import SourceSlice
from tests.cli.conftest import write_video
from tests.video.conftest import CLIPS, DECODERS, Clip, MakeClip, number_in, write

needs_decord = pytest.mark.skipif("decord" not in DECODERS, reason="decord is not installed")


def test_every_frame_comes_in_order_at_its_time(clip_name: str, make_clip: MakeClip) -> None:
    clip = CLIPS[clip_name]
    with open_source(make_clip(clip_name)) as source:
        frames = list(source.frames())
        numbers = [number_in(f.image) for f in frames]
        assert numbers == [7 if clip.still else i for i in range(len(clip.ticks))]
        assert [f.time_s for f in frames] == pytest.approx(clip.times_s, abs=1e-3)
        assert all(a.time_s < b.time_s for a, b in pairwise(frames))
        assert (source.info.height, source.info.width) == (clip.height, clip.width)
        found = {(f.image.dtype.name, f.image.shape, f.decoder) for f in frames}
        assert found == {("uint8", (clip.height, clip.width, 3), "pyav")}
        assert source.damage.ok
        assert source.damage.message == ""


# decord is not known to read the first six exactly; it counts two kinds wrong, and equal frames may
# hide a loss.
LEFT_TO_PYAV = {"10 bits", "avi", "asf", "raw", "interlaced", "transport stream"}
LEFT_TO_PYAV |= {"open groups", "open groups of h264", "a still"}


@needs_decord
def test_decord_gives_the_frames_and_steps_of_pyav_which_reads_what_it_cannot(
    clip_name: str, make_clip: MakeClip, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It reads in chunks, of 30 frames here.
    monkeypatch.setattr("protokv.video.decord_source._CHUNK_BYTES", 30 * 128 * 96 * 3)
    path = make_clip(clip_name)
    reader = "pyav" if clip_name in LEFT_TO_PYAV else "decord"
    with open_source(path, "pyav") as one, open_source(path, "decord") as other:
        assert other.info.decoder == "decord"
        for a, b in zip(one.frames(), other.frames(), strict=True):
            assert (a.time_s, b.decoder) == (b.time_s, reader)
            assert a.duration_s == pytest.approx(b.duration_s, abs=2e-3)
            assert np.array_equal(a.image, b.image)
        assert other.damage.ok
        # With a rate, decord leaves frames out.
        for mine, theirs in zip(read_steps(one, 7.3, 2), read_steps(other, 7.3, 2), strict=True):
            assert (mine.time_s, {*theirs.decoders}) == (theirs.time_s, {reader})
            assert np.array_equal(mine.images, theirs.images)


def test_decord_is_refused_where_it_is_missing(
    make_clip: MakeClip, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "decord", None)
    with pytest.raises(SourceUnreadable, match="decord cannot be loaded"):
        open_source(make_clip("constant rate"), "decord")


def test_an_unknown_kind_of_source_or_decoder_is_refused_with_the_known_ones(
    make_clip: MakeClip,
) -> None:
    with pytest.raises(SourceUnreadable, match="gopher") as caught:
        open_source("gopher://host/video")
    assert "file" in caught.value.hint
    with pytest.raises(ConfigError, match="cv2"):
        open_source(make_clip("one frame"), "cv2")  # type: ignore[arg-type]


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_reading_ends_when_it_is_asked_to_and_no_step_is_made_of_a_part(
    decoder: Decoder, make_clip: MakeClip
) -> None:
    with open_source(make_clip("constant rate"), decoder) as source:
        whole = list(read_steps(source, 5.0, 3))
        for asked in (0, 1, 7, 20):
            answers = partial(next, iter([False] * asked), True)
            part = list(read_steps(source, 5.0, 3, should_stop=answers))
            assert len(part) < len(whole)
            assert [s.images.tobytes() for s in part] == [
                s.images.tobytes() for s in whole[: len(part)]
            ]


@pytest.mark.parametrize("decoder", DECODERS)
def test_reading_from_a_later_time_begins_with_the_frame_shown_then(
    clip_name: str, decoder: Decoder, make_clip: MakeClip
) -> None:
    with open_source(make_clip(clip_name), decoder) as source:
        whole = [(f.time_s, f.image.tobytes()) for f in source.frames()]
        for start_s in [0.013, 0.4, 1.237, whole[-1][0], whole[-1][0] + 5.0]:
            first = max(i for i, (time_s, _) in enumerate(whole) if time_s <= start_s)
            part = [(f.time_s, f.image.tobytes()) for f in source.frames(start_s)]
            assert part == whole[first:], start_s
            assert source.damage.ok


def test_a_closed_source_ends_its_readings_and_refuses_new_ones(
    make_clip: MakeClip,
) -> None:
    with open_source(make_clip("constant rate")) as source:
        frames = source.frames()
        next(frames)
    source.close()
    assert len(list(frames)) <= 1
    with pytest.raises(SourceUnreadable, match="closed"):
        source.frames()


def test_a_path_that_is_no_video_is_refused_in_one_line(
    make_clip: MakeClip, tmp_path: Path
) -> None:
    whole = make_clip("constant rate").read_bytes()
    (tmp_path / "no-index.mp4").write_bytes(whole[: whole.find(b"moov") - 4])
    (tmp_path / "empty.mp4").write_bytes(b"")
    (tmp_path / "text.mp4").write_text("this is not a video\n" * 99)
    (tmp_path / "noise.mkv").write_bytes(np.random.default_rng(0).bytes(9999))
    os.mkfifo(tmp_path / "pipe.mp4")
    with wave.open(str(tmp_path / "sound.wav"), "wb") as output:
        output.setparams((1, 2, 8000, 0, "NONE", ""))
        output.writeframes(bytes(16_000))
    for path in [
        *sorted(tmp_path.iterdir()),
        tmp_path,
        tmp_path / "no.mp4",
        tmp_path / "no" / "no.mp4",
    ]:
        with pytest.raises(
            SourceNotFound if "no" in (path.stem, path.parent.name) else SourceUnreadable
        ) as caught:
            open_source(path)
        assert path.name in caught.value.message
        assert "\n" not in caught.value.message
        assert path.name != "sound.wav" or "found audio" in caught.value.message
        assert path.name != "no-index.mp4" or "to its end" in caught.value.hint
        assert path.name != "pipe.mp4" or f"protokv ingest - < {path}" in caught.value.hint


# Parts of a source


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_video(tmp_path_factory.mktemp("part") / "clip.mp4", 12)


@pytest.mark.parametrize(
    ("start_s", "duration_s"), [(0.0, None), (4.0, 3.0), (4.0, None), (11.0, 9.0), (0.0, 5.0)]
)
@pytest.mark.parametrize("first", [0, 1])
def test_its_steps_are_those_of_the_whole(
    clip: Path, start_s: float, duration_s: float | None, first: int
) -> None:
    with open_source(clip) as whole:
        steps = list(read_steps(whole, 2.0, 2))
        end = len(steps) if duration_s is None else round(start_s + duration_s)
        wanted = steps[round(start_s) : end][first:]
    with SourceSlice(open_source(clip), start_s, duration_s) as part:
        found = list(read_steps(part, 2.0, 2, first))
        assert part.info.duration_s == min(12.0 - start_s, duration_s or 99.0)
    assert [one.time_s for one in found] == [one.time_s - start_s for one in wanted]
    assert all(np.array_equal(a.images, b.images) for a, b in zip(found, wanted, strict=True))


def test_parts_are_other_sources_and_an_impossible_one_is_refused(clip: Path) -> None:
    with open_source(clip) as whole:
        prints = {
            whole.info.fingerprint,
            *(SourceSlice(whole, *of).info.fingerprint for of in ((0, 4), (4, 4), (4, None))),
        }
        assert len(prints) == 4
        for start_s, duration_s in ((12.0, None), (99.0, 1.0)):
            with pytest.raises(ConfigError):
                SourceSlice(whole, start_s, duration_s)
        whole.info = replace(whole.info, seekable=False)
        with pytest.raises(ConfigError, match="cannot be read in parts"):
            SourceSlice(whole, 1.0)


def test_a_kind_of_source_of_another_package_is_opened_by_its_entry_point(
    clip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = EntryPoint("vault", "tests.video.test_sources:open_vault", "protokv.sources")
    monkeypatch.setattr(
        "protokv.video.registry.entry_points",
        lambda group: EntryPoints([point]).select(group=group),
    )
    with open_source(f"vault://{clip}", max_pixels=4096 * 2160) as source:
        assert source.info.duration_s == 12.0


def open_vault(address: str, max_pixels: int | None) -> Source:
    assert max_pixels == 4096 * 2160
    return open_source(address.removeprefix("vault://"), max_pixels=max_pixels)


@pytest.mark.parametrize("name", ["late start", "avi"])
def test_a_step_that_is_not_found_again_leads_to_a_reading_from_the_beginning(
    name: str, make_clip: MakeClip, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    with open_source(make_clip(name)) as source:
        whole = list(read_steps(source, 5.0, 1))
        real = source._read
        monkeypatch.setattr(
            source, "_read", lambda wanted: (asked.append(wanted.from_beginning), real(wanted))[1]
        )
        for mark, readings in ((whole[3].mark, [False]), (whole[3].mark ^ 1, [False, True])):
            asked.clear()
            rest = list(read_steps(source, 5.0, 1, 4, mark=mark))
            assert asked == readings
            assert [s.images.tobytes() for s in rest] == [s.images.tobytes() for s in whole[4:]]


def test_tags_in_another_encoding_than_utf_8_are_no_reason_to_refuse_a_file(tmp_path: Path) -> None:
    path = write(Clip([0, 40], suffix="mkv"), tmp_path / "x.mkv")
    # The name of the program that wrote it.
    path.write_bytes(path.read_bytes().replace(b"Lavf", b"L\xff\xfef"))
    with open_source(path) as source:
        assert sum(1 for _ in source.frames()) == 2
