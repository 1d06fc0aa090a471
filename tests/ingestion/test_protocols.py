"""Real protocols on loopback: a program is the camera, which comes, goes and comes again."""

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from protokv.errors import SourceDenied, SourceError, SourceNotFound
from protokv.ingestion import (
    IngestProgress,
    LiveOptions,
    SourceLost,
    SourceRecovered,
    ingest,
    ingest_events,
)
from protokv.memories import DurableConfig
from protokv.state.reader import StateReader
from protokv.state.sources import WallClockLog
from protokv.texts import Keywords
from tests.ingestion.camera import send
from tests.mock_backbone import MockBackbone
from tests.video.test_stream import Quiet, served

CONFIG = DurableConfig(budget=40)
ROOT = Path(__file__).parents[2]


@pytest.fixture
def port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture
def start_camera() -> Iterator[Callable[..., None]]:
    """A function that starts a camera (`tests.ingestion.camera.send`); all of them are gone
    afterwards.
    """
    running: list[subprocess.Popen[bytes]] = []

    def start(**how: Any) -> None:
        running.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.ingestion.camera", json.dumps(how)], cwd=ROOT
            )
        )

    yield start
    for camera in running:
        camera.kill()
        camera.wait()


def watch(
    address: str,
    path: Path,
    enough: Callable[[list[Any]], bool],
    each: Callable[[Any], object] = repr,
    **live: Any,
) -> list[Any]:
    """Ingest until there are enough events, and call `each` after each; return the events."""
    events: list[Any] = []
    options = LiveOptions(**{"stall_s": 20.0, "for_s": 60.0, "retry_s": (0.05, 0.1), **live})
    how: Keywords = {"live": options, "should_stop": lambda: enough(events)}
    for event in ingest_events(address, path, CONFIG, backbone=MockBackbone(), **how):
        events.append(event)
        each(event)
    return events


def steps_in(events: list[Any]) -> int:
    return sum(isinstance(one, IngestProgress) for one in events)


def test_a_camera_that_comes_back_from_0_goes_on(
    start_camera: Callable[..., None], port: int, path: Path
) -> None:
    address = f"rtsp://admin:s3cret@127.0.0.1:{port}/1"
    # At real speed: frames far ahead of the clock begin a new count.
    camera: Keywords = {
        "form": "rtsp",
        "frames": 12,
        "pace": 1.0,
        "options": {"rtsp_transport": "tcp"},
    }
    camera["url"] = address.replace("admin:s3cret@", "")

    def recovered(events: list[Any]) -> bool:
        return any(isinstance(one, SourceRecovered) for one in events) and steps_in(events[-1:]) > 0

    start_camera(**camera)

    def begin_again(event: Any) -> None:
        if isinstance(event, SourceLost):
            start_camera(**camera)

    events = watch(address, path, recovered, begin_again, input={"rtsp_flags": "listen"})
    kinds = [type(one) for one in events if isinstance(one, SourceLost | SourceRecovered)]
    assert kinds == [SourceLost, SourceRecovered]
    assert steps_in(events) >= 2
    found = WallClockLog.read(StateReader.open(path).header.source)
    assert found is not None
    assert (found.gaps_in_all, found.lost) == (1, False)
    assert b"s3cret" not in path.read_bytes()
    assert "s3cret" not in repr(events)


@pytest.mark.parametrize(
    ("scheme", "form", "ours", "theirs", "options"),
    [
        ("udp", "mpegts", "", "?pkt_size=1316", {}),
        ("rtp", "rtp_mpegts", "", "", {}),
        ("tcp", "mpegts", "?listen=1", "", {}),
        ("rtmp", "flv", "/live/a", "/live/a", {"listen": "1"}),
    ],
)
def test_a_stream_from_the_network_is_watched(
    scheme: str,
    form: str,
    ours: str,
    theirs: str,
    options: Keywords,
    start_camera: Callable[..., None],
    port: int,
    path: Path,
) -> None:
    address = f"{scheme}://127.0.0.1:{port}"
    start_camera(url=address + theirs, form=form, frames=10**6, pace=2.0)
    *_, summary = watch(address + ours, path, lambda events: steps_in(events) >= 1, input=options)
    assert (summary.steps, summary.damaged) == (1, False)


@pytest.mark.parametrize(
    ("status", "error", "requests"), [(401, SourceDenied, 2), (404, SourceNotFound, 1)]
)
def test_a_wrong_address_or_password_is_one_error_without_secrets_and_is_not_tried_again(
    status: int, error: type[SourceError], requests: int, path: Path, tmp_path: Path
) -> None:
    asked: list[str | None] = []

    class Locked(Quiet):
        def do_GET(self) -> None:
            asked.append(self.headers["Authorization"])
            self.send_response(status)
            self.send_header("WWW-Authenticate", 'Basic realm="camera"')
            self.end_headers()

    with served(tmp_path, Locked) as address, pytest.raises(error) as caught:
        ingest(
            f"{address.replace('//', '//admin:s3cret@')}/1.ts?token=s3cret",
            path,
            CONFIG,
            backbone=MockBackbone(),
        )
    assert "s3cret" not in f"{caught.value.message}{caught.value.hint}{caught.value.__cause__}"
    assert caught.value.__suppress_context__
    assert len(asked) == requests
    assert not path.exists()


def test_a_playlist_is_live_until_it_has_an_end_and_names_no_file_of_this_machine(
    path: Path, tmp_path: Path
) -> None:
    listing = tmp_path / "live.m3u8"
    names = str(tmp_path / "%d.ts")
    options = {"hls_time": "1", "hls_list_size": "0", "hls_segment_filename": names}
    send(str(listing), "hls", 60, options=options)
    whole = listing.read_text()
    with served(tmp_path) as folder:
        address = f"{folder}/live.m3u8"
        listing.write_text(whole.replace("#EXT-X-ENDLIST\n", ""))
        *_, live = watch(
            address, path, lambda events: steps_in(events) >= 2, input={"live_start_index": "0"}
        )
        assert live.steps == 2
        listing.write_text(whole)
        ended = tmp_path / "ended.safetensors"
        for _ in range(2):
            summary = ingest(address, ended, CONFIG, backbone=MockBackbone())
            assert (summary.complete, summary.steps, summary.gaps) == (True, 6, 0)
        shutil.copy(tmp_path / "0.ts", tmp_path / "private.ts")
        listing.write_text(
            "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n"
            f"file://{tmp_path}/private.ts\n#EXT-X-ENDLIST\n"
        )
        other = tmp_path / "other.safetensors"
        with pytest.raises(SourceError):
            watch(address, other, lambda _: False, give_up_s=0.0, stall_s=10.0)
    assert not other.exists()
