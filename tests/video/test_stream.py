"""One connection to a stream: pipes and web servers, their damage, and refused sources."""

import http.server
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from protokv.errors import ConfigError, ProtoKVError, SourceNotFound, SourceUnreadable
from protokv.video import open_source
from protokv.video.av_source import AVSource
from tests.video.conftest import STEADY, Clip, MakeClip, number_in, write


@contextmanager
def piped(data: bytes) -> Iterator[str]:
    """Give the address of a pipe that gives these bytes."""
    out, into = os.pipe()

    def pour() -> None:
        with suppress(BrokenPipeError), os.fdopen(into, "wb") as file:
            file.write(data)

    thread = threading.Thread(target=pour, daemon=True)
    thread.start()
    try:
        yield f"pipe:{out}"
    finally:
        os.close(out)
        thread.join(20)


def test_an_mp4_with_its_index_at_the_end_is_refused_with_advice(tmp_path: Path) -> None:
    path = write(Clip(STEADY, codec="rawvideo"), tmp_path / "x.mov")
    with (
        piped(path.read_bytes()) as address,
        pytest.raises(SourceUnreadable, match="index") as caught,
    ):
        open_source(address)
    assert "frag_keyframe" in caught.value.hint


PLAYLIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile:/dev/null\n#EXT-X-ENDLIST\n"


@pytest.mark.parametrize("data", [b"", b"no video at all " * 500, b"\x00" * 4096, PLAYLIST])
def test_a_pipe_without_a_video_is_refused(data: bytes) -> None:
    said = "not a video" if data else "nothing came"
    with piped(data) as address, pytest.raises(SourceUnreadable, match=said):
        open_source(address)


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(folder: Path, handler: type[Quiet] = Quiet) -> Iterator[str]:
    """Serve a folder on loopback; give its address."""
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), lambda *a: handler(*a, directory=str(folder))
    ) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def test_a_video_on_a_web_server_is_read_like_a_file(make_clip: MakeClip) -> None:
    path = make_clip("matroska in milliseconds")
    with served(path.parent) as address, AVSource(f"{address}/{path.name}") as source:
        assert source.info.seekable
        assert source.info.fingerprint
        assert source.info.duration_s == pytest.approx(1.5, abs=0.1)
        for _ in range(2):
            assert [number_in(frame.image) for frame in source.frames()] == list(range(45))
        assert [number_in(frame.image) for frame in source.frames(1.0)] == list(range(30, 45))
        assert source.damage.ok


def test_a_server_that_refuses_and_a_protocol_that_is_not_there_are_told_apart() -> None:
    # FFmpeg says "Input/output error", which would be tried again for ever.
    with pytest.raises(
        SourceNotFound, match=r"nothing answers at rtsp://no\.invalid/x: its host is not known"
    ):
        AVSource("rtsp://u:s3cret@no.invalid/x")
    # Of a wheel of PyAV; a build of one's own may have it.
    with pytest.raises((ConfigError, SourceUnreadable)) as refused:
        AVSource("srt://127.0.0.1:9", timeout_s=1.0)
    if isinstance(refused.value, ConfigError):
        assert "protokv ingest -" in refused.value.hint


@pytest.mark.skipif(sys.platform != "linux", reason="says what Linux has")
@pytest.mark.parametrize(
    ("source", "error", "said", "hint"),
    [
        ("avfoundation:0", ConfigError, "no avfoundation on this system", "/dev/video0"),
        ("dshow:video=x", ConfigError, "no dshow on this system", "screen:"),
        ("screen::77", SourceUnreadable, "no X display answers at :77", "DISPLAY"),
        ("/dev/video77", SourceNotFound, "/dev/video77", "device"),
    ],
)
def test_a_missing_screen_or_a_device_of_another_system_is_named(
    source: str, error: type[ProtoKVError], said: str, hint: str
) -> None:
    with pytest.raises(error, match=said) as caught:
        AVSource(source)
    assert hint in caught.value.hint


def test_frames_after_a_loss_have_the_size_of_those_before_and_too_large_ones_are_refused(
    make_clip: MakeClip,
) -> None:
    data = make_clip("transport stream").read_bytes()
    with piped(data) as address, AVSource(address, size=(32, 48)) as source:
        assert next(source.frames()).image.shape == (48, 32, 3)
    with piped(data) as address, pytest.raises(SourceUnreadable):
        AVSource(address, max_pixels=64 * 64)
