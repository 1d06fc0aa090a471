"""FFmpeg's own program publishes by RTMP, if the machine has it; other protocols are in `tests.ingestion`."""

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


def test_a_stream_that_it_publishes_by_rtmp_is_watched(film: Path, tmp_path: Path) -> None:
    address = f"rtmp://127.0.0.1:{free_port()}/live"
    command = [FFMPEG or "", "-loglevel", "error", "-stream_loop", "-1", "-re", "-i", str(film), "-c", "copy"]
    events: list[Any] = []
    cameras: list[subprocess.Popen[bytes]] = []

    def enough() -> bool:
        # It ends where nobody reads yet, and is started again.
        if not cameras or cameras[-1].poll() is not None:
            publish = [*command, "-f", "flv", "-listen", "1", address]
            cameras.append(subprocess.Popen(publish, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        return sum(isinstance(one, Progress) for one in events) >= 3

    live = LiveOptions(stall_s=30.0, for_s=90.0, retry_s=(0.05, 0.1))
    run = ingest(address, tmp_path / "s.safetensors", CONFIG, backbone=MockBackbone(), live=live, should_stop=enough)
    try:
        for event in run:
            events.append(event)
    finally:
        for camera in cameras:
            camera.kill()
            camera.wait(30)
    assert isinstance(events[-1], Summary)
    assert events[-1].steps >= 3
