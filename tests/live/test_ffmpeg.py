"""FFmpeg's own program as the other side, where the machine has it: what it publishes and pipes is watched."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from protokv.config import DurableConfig
from protokv.ingestion import LiveOptions, Progress, Summary, ingest
from tests.ingestion.test_protocols import free_port
from tests.mock_backbone import MockBackbone
from tests.video.conftest import Clip, write

FFMPEG = shutil.which("ffmpeg")
pytestmark = pytest.mark.skipif(FFMPEG is None, reason="there is no program ffmpeg on this machine")

CONFIG = DurableConfig(budget=40)


@pytest.fixture(scope="module")
def film(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(Clip([40 * i for i in range(100)]), tmp_path_factory.mktemp("film") / "x.mp4")


def ffmpeg(film: Path, *options: str, loop: bool = True, **how: Any) -> subprocess.Popen[bytes]:
    endless = ["-stream_loop", "-1", "-re"] if loop else []
    command = [FFMPEG or "", "-loglevel", "error", *endless, "-i", str(film), "-c", "copy", *options]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **how)


@pytest.mark.parametrize(
    ("scheme", "options", "reading"),
    [
        ("rtsp", ["-f", "rtsp", "-rtsp_transport", "tcp"], {"rtsp_flags": "listen"}),
        ("rtmp", ["-f", "flv", "-listen", "1"], {}),
        ("tcp", ["-f", "mpegts", "-listen", "1"], {}),
    ],
)
def test_what_it_publishes_is_watched(
    scheme: str, options: list[str], reading: dict[str, str], film: Path, tmp_path: Path
) -> None:
    address = f"{scheme}://127.0.0.1:{free_port()}/live"
    live = LiveOptions(stall_s=30.0, for_s=90.0, retry_s=(0.05, 0.1), input=reading)
    events: list[Any] = []
    cameras: list[subprocess.Popen[bytes]] = []

    def enough() -> bool:
        # Where nobody listens yet it ends, and is started again.
        if not cameras or cameras[-1].poll() is not None:
            cameras.append(ffmpeg(film, *options, address))
        return sum(isinstance(one, Progress) for one in events) >= 3

    try:
        for event in ingest(
            address, tmp_path / "s.safetensors", CONFIG, backbone=MockBackbone(), live=live, should_stop=enough
        ):
            events.append(event)
    finally:
        for camera in cameras:
            camera.kill()
            camera.wait(30)
    assert isinstance(events[-1], Summary)
    assert events[-1].steps >= 3


@pytest.mark.parametrize("form", [["mpegts"], ["matroska"], ["mp4", "-movflags", "frag_keyframe"]], ids=lambda f: f[0])
def test_what_it_pipes_is_watched_to_its_end(form: list[str], film: Path, tmp_path: Path) -> None:
    camera = ffmpeg(film, "-f", *form, "-", loop=False, stdout=subprocess.PIPE)
    assert camera.stdout is not None
    with camera, camera.stdout as pipe:
        *_, summary = ingest(
            f"pipe:{pipe.fileno()}", tmp_path / "s.safetensors", CONFIG, backbone=MockBackbone(), live=LiveOptions()
        )
    assert (summary.complete, summary.damaged, summary.stream_time_s) == (True, False, 4.0)
