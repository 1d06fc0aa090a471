"""A camera as a program: it encodes numbered frames and sends them to an address.

PyAV holds Python's lock while an output connects, so a camera cannot stand in the process of its
reader.
"""

import json
import sys
import time
from collections.abc import Mapping

import av

from tests.video.conftest import burn

# Seconds to try to connect; frames a second, and the size of the pictures.
PATIENCE_S = 30.0
RATE = 10
WIDTH = 128
HEIGHT = 96


def send(
    url: str, form: str, frames: int, pace: float = 0.0, options: Mapping[str, str] | None = None
) -> None:
    """Send so many frames, at `pace` times real speed; 0: as fast as it can. PyAV's errors are
    raised.
    """
    with av.open(url, "w", format=form, options=dict(options or {})) as output:
        stream = output.add_stream(
            "libx264", rate=RATE, options={"tune": "zerolatency", "preset": "ultrafast"}
        )
        stream.width = WIDTH
        stream.height = HEIGHT
        stream.pix_fmt = "yuv420p"
        stream.codec_context.gop_size = 5
        stream.codec_context.thread_count = 1
        began_s = time.monotonic()
        for i in range(frames):
            frame = av.VideoFrame.from_ndarray(burn(i, WIDTH, HEIGHT), format="rgb24")
            frame.pts = i
            output.mux(stream.encode(frame))
            if pace:
                time.sleep(max(0.0, began_s + (i + 1) / RATE / pace - time.monotonic()))
        output.mux(stream.encode(None))


if __name__ == "__main__":
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        try:
            send(**json.loads(sys.argv[1]))
            break
        except av.error.FFmpegError:
            time.sleep(0.02)
