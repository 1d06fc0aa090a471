"""A camera for tests: a process that encodes numbered frames and sends them somewhere, at real speed or faster.

`python -m tests.live.feeder JSON`: one object with the fields of `Camera`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import av

from tests.video.conftest import burn

# Seconds to try to connect, and the size of the pictures.
PATIENCE_S, WIDTH, HEIGHT = 20.0, 128, 96


@dataclass
class Camera:
    url: str
    format: str = "mpegts"
    frames: int = 20
    rate: int = 10
    pace: float = 0.0  # times real time; 0: as fast as it goes
    options: dict[str, str] = field(default_factory=dict)

    def start(self, **options: Any) -> subprocess.Popen[bytes]:
        """The camera as a process."""
        command = [sys.executable, "-m", "tests.live.feeder", json.dumps(asdict(self))]
        return subprocess.Popen(command, **options)

    def run(self) -> None:
        """Send everything."""
        until_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                with av.open(self.url, "w", format=self.format, options=self.options) as output:
                    self._send(output)
                return
            except av.error.FFmpegError:
                if time.monotonic() > until_s:
                    raise

    def _send(self, output: Any) -> None:
        stream = output.add_stream("libx264", rate=self.rate, options={"tune": "zerolatency", "preset": "ultrafast"})
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        stream.codec_context.gop_size = 5
        stream.codec_context.thread_count = 1
        began_s = time.monotonic()
        for i in range(self.frames):
            frame = av.VideoFrame.from_ndarray(burn(i, WIDTH, HEIGHT), format="rgb24")
            frame.pts = i
            output.mux(stream.encode(frame))
            if self.pace:
                time.sleep(max(0.0, began_s + (i + 1) / self.rate / self.pace - time.monotonic()))
        output.mux(stream.encode(None))


if __name__ == "__main__":
    Camera(**json.loads(sys.argv[1])).run()
