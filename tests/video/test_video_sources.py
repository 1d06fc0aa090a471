"""What every source must do, whichever decoder reads and whatever the container."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest

from protokv.errors import ConfigError, SourceNotFound, SourceUnreadable
from protokv.video import open_source

needs_decord = pytest.mark.skipif(importlib.util.find_spec("decord") is None, reason="decord is not installed")
DECODERS = ["pyav", pytest.param("auto", marks=needs_decord)]


@pytest.mark.parametrize("decoder", DECODERS)
def test_every_frame_comes_in_order_at_its_time(decoder, clip_name, clips, make_clip, number_in):
    clip = clips[clip_name]
    with open_source(make_clip(clip_name), decoder) as source:
        frames = list(source.frames())
        turned = clip.rotation // 90
        numbers = [number_in(np.rot90(f.image, -turned)) for f in frames]
        assert numbers == [7 if clip.still else i for i in range(len(clip.ticks))]
        assert [f.time_s for f in frames] == pytest.approx(clip.times_s, abs=1e-3)
        assert all(a.time_s < b.time_s for a, b in pairwise(frames))
        height, width = (clip.width, clip.height) if turned % 2 else (clip.height, clip.width)
        assert (source.info.height, source.info.width) == (height, width)
        for frame in frames:
            assert frame.image.dtype == np.uint8
            assert frame.image.shape == (height, width, 3)
        assert source.damage.ok
        assert source.damage.message == ""
        assert sum(source.frames_by_decoder.values()) == len(frames)


@needs_decord
def test_decord_and_pyav_give_the_same_bytes_at_the_same_times(clip_name, make_clip):
    path = make_clip(clip_name)
    with open_source(path, "pyav") as one, open_source(path, "auto") as other:
        for a, b in zip(one.frames(), other.frames(), strict=True):
            assert a.time_s == b.time_s
            assert a.duration_s == pytest.approx(b.duration_s, abs=2e-3)
            assert np.array_equal(a.image, b.image)


@needs_decord
@pytest.mark.parametrize(
    "name", ["constant rate", "variable rate", "reordered frames", "late start", "transport stream"]
)
def test_decord_really_reads_the_files_it_is_chosen_for(name, make_clip):
    with open_source(make_clip(name)) as source:
        assert source.info.decoder == "decord"
        count = sum(1 for _ in source.frames())
        assert source.frames_by_decoder == {"decord": count}


@needs_decord
def test_equal_frames_in_a_row_are_checked_by_pyav_because_decord_hides_losses_so(make_clip):
    with open_source(make_clip("a still")) as source:
        assert sum(1 for _ in source.frames()) == 61
        assert source.damage.ok
        assert source.info.decoder == "decord"
        assert source.frames_by_decoder == {"pyav": 61}


@needs_decord
@pytest.mark.parametrize("name", ["10 bits", "avi", "interlaced"])
def test_what_decord_cannot_read_exactly_is_left_to_pyav_and_refused_when_decord_is_asked_for(name, make_clip):
    assert open_source(make_clip(name)).info.decoder == "pyav"
    with pytest.raises(SourceUnreadable, match="decord") as caught:
        open_source(make_clip(name), "decord")
    assert "pyav" in caught.value.hint


@needs_decord
def test_a_stream_with_key_frames_too_far_apart_for_memory_is_left_to_pyav(make_clip, monkeypatch, number_in):
    import protokv.video.decord_source as module

    monkeypatch.setattr(module, "SEGMENT_BYTES", 20 * 128 * 96 * 3)
    assert open_source(make_clip("reordered frames")).info.decoder == "pyav"
    # A Matroska index does not tell: the source finds out while reading.
    with open_source(make_clip("matroska in milliseconds")) as source:
        monkeypatch.setattr(module, "SEGMENT_BYTES", 9 * 128 * 96 * 3)
        assert [number_in(f.image) for f in source.frames()] == list(range(45))
        assert source.damage.ok
        assert "pyav" in source.frames_by_decoder


def test_auto_reads_with_pyav_where_decord_is_not_installed(make_clip, monkeypatch):
    import protokv.video.decord_source as module

    monkeypatch.setattr(module, "is_installed", lambda: False)
    with open_source(make_clip("constant rate")) as source:
        assert source.info.decoder == "pyav"
        assert sum(1 for _ in source.frames()) == 61
    with pytest.raises(SourceUnreadable, match="not installed"):
        open_source(make_clip("constant rate"), "decord")


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize(
    "name",
    ["constant rate", "variable rate", "reordered frames", "open groups", "open groups of h264", "late start",
     "transport stream", "matroska in milliseconds", "fragmented", "avi", "one frame"],
)  # fmt: skip
def test_reading_from_a_later_time_begins_with_the_frame_shown_then(decoder, name, make_clip):
    with open_source(make_clip(name), decoder) as source:
        whole = [(f.time_s, f.image.tobytes()) for f in source.frames()]
        for start_s in [0.0, 0.013, 0.4, 0.41, 1.0, 1.237, whole[-1][0], whole[-1][0] + 5.0]:
            first = max(i for i, (time_s, _) in enumerate(whole) if time_s <= start_s)
            part = [(f.time_s, f.image.tobytes()) for f in source.frames(start_s)]
            assert part == whole[first:], start_s
            assert source.damage.ok


def test_a_frame_that_nobody_looks_at_is_not_converted(make_clip):
    with open_source(make_clip("constant rate"), "pyav") as source:
        frame = next(source.frames())
        assert not isinstance(frame._image, np.ndarray)
        assert frame.image is frame.image


def test_info_is_plain_json_without_the_folder_and_the_same_every_time(make_clip):
    path = make_clip("constant rate")
    info = open_source(path).info
    assert json.loads(json.dumps(info.to_dict())) == info.to_dict()
    assert info.name == path.name
    assert str(path.parent) not in json.dumps(info.to_dict())
    assert info.codec == "h264"
    assert info.rate_fps == 25
    assert info.duration_s == pytest.approx(2.44)
    with open_source(path) as source:
        list(source.frames())
        assert source.info == info


def test_the_fingerprint_tells_files_apart_that_differ_in_one_byte(make_clip, tmp_path):
    data = bytearray(make_clip("matroska in milliseconds").read_bytes())
    (tmp_path / "a.mkv").write_bytes(data)
    data[-1] ^= 1
    (tmp_path / "b.mkv").write_bytes(data)
    a, b = (open_source(tmp_path / n, "pyav").info.fingerprint for n in ("a.mkv", "b.mkv"))
    assert a != b


def test_a_closed_source_says_so(make_clip):
    source = open_source(make_clip("constant rate"))
    source.close()
    source.close()
    with pytest.raises(SourceUnreadable, match="closed"):
        source.frames()


def test_a_path_with_nothing_there_is_not_found(tmp_path):
    for path in [tmp_path / "no.mp4", tmp_path / "no" / "no.mp4"]:
        with pytest.raises(SourceNotFound, match=r"no\.mp4") as caught:
            open_source(path)
        assert caught.value.hint


def test_what_is_not_a_video_is_refused_in_one_line(tmp_path):
    (tmp_path / "empty.mp4").write_bytes(b"")
    (tmp_path / "text.mp4").write_text("this is not a video\n" * 99)
    (tmp_path / "text.txt").write_text("FFmpeg would draw this text as a film\n" * 99)
    (tmp_path / "noise.mkv").write_bytes(np.random.default_rng(0).bytes(9999))
    (tmp_path / "list.m3u8").write_text("#EXTM3U\n#EXTINF:1,\nother.ts\n")
    os.mkfifo(tmp_path / "pipe.mp4")
    for path in [*sorted(tmp_path.iterdir()), tmp_path]:
        with pytest.raises(SourceUnreadable) as caught:
            open_source(path)
        assert path.name in caught.value.message
        assert "\n" not in caught.value.message


def test_a_file_with_sound_only_is_refused(tmp_path):
    import av

    path = tmp_path / "sound.m4a"
    with av.open(str(path), "w") as output:
        stream = output.add_stream("aac", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
        frame.sample_rate = 8000
        output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    with pytest.raises(SourceUnreadable, match="found audio"):
        open_source(path)


def test_an_unknown_decoder_is_a_configuration_error(make_clip):
    with pytest.raises(ConfigError, match="cv2"):
        open_source(make_clip("one frame"), "cv2")  # type: ignore[arg-type]


def test_importing_the_package_imports_no_decoder_and_no_torch():
    code = "import sys, protokv.video; print(sorted({'torch', 'decord', 'av'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@needs_decord
def test_reading_damage_writes_nothing_to_stdout_or_stderr(make_clip, tmp_path):
    data = bytearray(make_clip("constant rate").read_bytes())
    at = data.find(b"mdat")
    for offset in range(at + 900, at + 2400, 61):
        data[offset] ^= 0xFF
    (tmp_path / "bad.mp4").write_bytes(data)
    code = (
        "import sys; from protokv.video import open_source\n"
        "with open_source(sys.argv[1]) as s: n = len([f.image for f in s.frames()]); assert not s.damage.ok"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "bad.mp4")], capture_output=True, text=True, check=False
    )
    assert (out.returncode, out.stdout, out.stderr) == (0, "", "")
