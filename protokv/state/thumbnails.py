"""`Thumbnails`: a few small pictures of a stream, kept with its memory, so that a state can be
looked at.

The first picture of every 2^k-th step is kept, with the smallest k that leaves at most `most` of
them, and that of the last step. So the pictures depend on nothing but the steps so far: a run that
was interrupted keeps the same ones as a whole one, byte for byte. They are JPEGs of at most 160
pixels a side and 3 KiB. Nothing here decodes one from a state.
"""

from __future__ import annotations

import io
import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from protokv.core.packing import check_tensor_shapes
from protokv.core.parts import SessionAttachment
from protokv.core.tensors import Axes, Specs, TensorDict, Tensors

_Picture = NDArray[np.uint8]

# Pictures to keep: 9 to 17 fit into a row of a page and show the course of a video, in 15 to 40
# KiB.
DEFAULT_THUMBNAILS = 16
MOST_THUMBNAILS = 256

# Limits of a picture: pixels a side, bytes, and qualities, tried in this order until it is small.
THUMBNAIL_SIDE = 160
MOST_THUMBNAIL_BYTES = 3 << 10
_QUALITIES = (65, 45, 25)

_JPEG, _STEP, _TIME = (f"thumbnails.{name}" for name in ("jpeg", "step", "time_s"))


class Thumbnail(NamedTuple):
    """A picture of the stream: its step, its stream time in seconds, and its JPEG."""

    step: int
    time_s: float
    jpeg: bytes


class Thumbnails(SessionAttachment):
    """The small pictures of a stream; `most` of them and the last one."""

    def __init__(self, most: int = DEFAULT_THUMBNAILS) -> None:
        self.most = most
        self._kept: list[Thumbnail] = []
        self._last: tuple[int, float, _Picture] | None = None

    @staticmethod
    def declare() -> Specs:
        """Declare the files and what they are of; a state may have none."""
        what = "JPEG files of some steps, each with zeros at its end"
        declare = Axes(
            {"thumbnail": MOST_THUMBNAILS + 1, "thumbnail_byte": MOST_THUMBNAIL_BYTES}
        ).declare
        return (
            declare(_JPEG, "thumbnail thumbnail_byte", torch.uint8, what, optional=True),
            declare(_STEP, "thumbnail", torch.int64, "their steps", "step", optional=True),
            declare(
                _TIME, "thumbnail", torch.float64, "their stream times", "seconds", optional=True
            ),
        )

    @classmethod
    def read(cls, tensors: Tensors) -> Thumbnails | None:
        """Return those of a state; None if it has none. StateCorrupt if a tensor is missing or of
        another shape.
        """
        own = {spec.name: tensors[spec.name] for spec in cls.declare() if spec.name in tensors}
        if not own:
            return None
        check_tensor_shapes(own, [replace(spec, optional=False) for spec in cls.declare()])
        found = cls(MOST_THUMBNAILS)
        files = [bytes(one).rstrip(b"\0") for one in own[_JPEG].numpy()]
        found._kept = list(map(Thumbnail, own[_STEP].tolist(), own[_TIME].tolist(), files))
        return found

    @property
    def capacity_bytes(self) -> int:
        """The most bytes that they take in a state: of each its file, its step and its time."""
        return (self.most + 1) * (MOST_THUMBNAIL_BYTES + 2 * 8)

    def add(self, step: int, time_s: float, picture: _Picture) -> None:
        """Take the picture (`make_thumbnail`) of a step; steps come in order."""
        stride = 1
        while math.ceil((step + 1) / stride) > self.most:
            stride *= 2
        self._kept = [one for one in self._kept if one.step % stride == 0]
        self._last = (step, time_s, picture)
        if step % stride == 0:
            self._kept = self.all()

    def all(self) -> list[Thumbnail]:
        """Return them in the order of the stream."""
        if self._last is None or (self._kept and self._kept[-1].step == self._last[0]):
            return list(self._kept)
        step, time_s, picture = self._last
        return [*self._kept, Thumbnail(step, time_s, encode_thumbnail(picture))]

    def live_tensors(self) -> TensorDict:
        """Return all of them."""
        found = self.all()
        if not found:
            return {}
        length = max(len(one.jpeg) for one in found)
        files = bytearray(b"".join(one.jpeg.ljust(length, b"\0") for one in found))
        return {
            _JPEG: torch.frombuffer(files, dtype=torch.uint8).view(-1, length),
            _STEP: torch.tensor([one.step for one in found]),
            _TIME: torch.tensor([one.time_s for one in found], dtype=torch.float64),
        }


def make_thumbnail(image: _Picture) -> _Picture:
    """Return an RGB picture `[h, w, 3]`, uint8, whose sides have at most `THUMBNAIL_SIDE` pixels,
    and more than half of these if it was larger.
    """
    # Every step is shrunk, since it may be the last one. Means of whole blocks take a sixth of the
    # time of a filter.
    return np.asarray(
        Image.fromarray(image).reduce(math.ceil(max(image.shape[:2]) / THUMBNAIL_SIDE))
    )


def encode_thumbnail(picture: _Picture) -> bytes:
    """Return a picture as a JPEG of at most `MOST_THUMBNAIL_BYTES`; a busy one loses detail, and
    then size.
    """
    image = Image.fromarray(picture)
    while True:
        for quality in _QUALITIES:
            file = io.BytesIO()
            image.save(file, "JPEG", quality=quality)
            if file.tell() <= MOST_THUMBNAIL_BYTES:
                return file.getvalue()
        image = image.reduce(2)
