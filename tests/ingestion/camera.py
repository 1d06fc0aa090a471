"""A camera as a program: it encodes numbered frames and sends them to an address.

PyAV holds Python's lock while an output connects, so a camera cannot stand in the process of its
reader.
"""

import json
import sys
import time
from collections.abc import Iterator, Mapping

import av
import numpy as np
from numpy.typing import NDArray

from tests.video.conftest import burn, encode

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
    how = {"tune": "zerolatency", "preset": "ultrafast", "g": "5", "threads": "1"}
    images = draw(frames, pace)
    encode(url, (WIDTH, HEIGHT), images, RATE, form=form, mux=options, **how)


def draw(frames: int, pace: float) -> Iterator[NDArray[np.uint8]]:
    began_s = time.monotonic()
    for i in range(frames):
        yield burn(i, WIDTH, HEIGHT)
        if pace:
            time.sleep(max(0.0, began_s + (i + 1) / RATE / pace - time.monotonic()))


if __name__ == "__main__":
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        try:
            send(**json.loads(sys.argv[1]))
            break
        except av.error.FFmpegError:
            time.sleep(0.02)
