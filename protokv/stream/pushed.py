"""Frames that a program gives to a session one by one: which of them are sampled, and which make a
step together.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protokv.core.step import StreamClock
from protokv.errors import ConfigError

STREAM_GAP_S = 5.0  # a silence of more than this parts frames: they make no step together

_Image = NDArray[np.uint8]


def convert_picture_to_rgb(frame: Any, *, bgr: bool = False) -> _Image:
    """Return a picture of PIL, or an array `[h, w, 3]` uint8 in RGB or BGR, as such an array in
    RGB. ConfigError.
    """
    image = np.asarray(frame.convert("RGB") if hasattr(frame, "convert") else frame)
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape:
        what = f"got {list(image.shape)} {image.dtype}"
        raise ConfigError(
            f"a frame is one picture, [height, width, 3] uint8; {what}",
            hint="push frames one by one",
        )
    return image[..., ::-1] if bgr else image


class PushedFrameBuffer:
    """The frames of a stream that wait for the rest of their step."""

    def __init__(self, from_s: float) -> None:
        """Begin at stream time `from_s`."""
        self._images: list[_Image] = []
        self._last_s = from_s
        self._start_s = 0.0
        self._next_slot = 0

    def add(
        self, frame: Any, time_s: float, clock: StreamClock, *, bgr: bool = False
    ) -> tuple[_Image, float] | None:
        """Take a frame as `Session.push` does; return images `[n, h, w, 3]` and start of a step if
        there is one now.
        """
        if not self._last_s <= time_s < math.inf:
            raise ConfigError(
                f"a frame at {time_s:g} s comes after one at {self._last_s:g} s",
                hint="push in order",
            )
        slot = math.floor(time_s * clock.fps + 1e-6)
        n = clock.frames_per_step
        step = None
        if slot >= max(self._next_slot, round(clock.stream_time_s * clock.fps)):
            image = convert_picture_to_rgb(frame, bgr=bgr)
            if self._images and slot - self._next_slot > STREAM_GAP_S * clock.fps:
                step = self._end(n)
            if self._images and image.shape != self._images[0].shape:
                raise ConfigError(
                    "the frames of a step have one size, and this one another",
                    hint="resize them alike",
                )
            self._start_s = self._start_s if self._images else slot / clock.fps
            self._images.append(image)
            self._next_slot = slot + 1
        self._last_s = time_s
        return self._end(n) if len(self._images) == n else step

    def finish(self, clock: StreamClock) -> tuple[_Image, float] | None:
        """Return the step of the frames that wait, with the last one again; None: none waits."""
        return self._end(clock.frames_per_step) if self._images else None

    def _end(self, n: int) -> tuple[_Image, float]:
        # A step that a silence cuts short has its last frame again.
        images = self._images + self._images[-1:] * (n - len(self._images))
        self._images = []
        return np.stack(images), self._start_s
