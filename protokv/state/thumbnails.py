"""`Thumbnails`: a few small pictures of a stream, kept beside its memory, so that a state can be looked at.

The first picture of every 2^k-th step is kept, with the smallest k that leaves at most `most` of them, and that of the
last step. So the pictures depend on nothing but the steps so far: a run that was interrupted keeps the same ones as a
whole one, byte for byte. They are JPEGs of at most 160 pixels a side and 3 KiB.

They are data from anywhere when a state is read: each is held against its size, its format and its place in the stream.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protokv.core.packing import check_shapes
from protokv.core.parts import Attachment
from protokv.core.tensors import TensorSpec, tensor_shapes
from protokv.errors import StateCorrupt

Picture = NDArray[np.uint8]

DEFAULT = 16
"""Pictures to keep: between 9 and 17 fit into a row of a page and show the course of a video, in 15 to 40 KiB."""
MOST = 256
SIDE = 160
MOST_BYTES = 3 << 10

# Of each picture: where it ends, its step and its time, in 8 bytes each.
_BESIDE = 3 * 8

# The first is used that makes a picture small enough.
_QUALITIES = (65, 45, 25)

_JPEG, _ENDS, _STEP, _TIME = (f"thumbnails.{name}" for name in ("jpeg", "ends", "step", "time_s"))


class Thumbnail(NamedTuple):
    """A picture of the stream: its step, its stream time in seconds, and its JPEG."""

    step: int
    time_s: float
    jpeg: bytes


class Thumbnails(Attachment):
    """The small pictures of a stream; `most` of them and the last one."""

    def __init__(self, most: int = DEFAULT) -> None:
        self.most = most
        self._kept: list[Thumbnail] = []
        self._last: tuple[int, float, Picture] | None = None

    @staticmethod
    def declare() -> tuple[TensorSpec, ...]:
        """Declare the files, one behind the other, and where each ends; a state may have none."""
        many = (MOST + 1,)

        def spec(name: str, dim: str, shape: tuple[int], dtype: torch.dtype, meaning: str, unit: Any = "") -> Any:
            return TensorSpec(name, (dim,), shape, dtype, meaning, unit, optional=True)

        return (
            spec(_ENDS, "thumbnail", many, torch.int64, "where each of these files ends"),
            spec(_JPEG, "thumbnail_byte", (many[0] * MOST_BYTES,), torch.uint8, "JPEG files of some steps"),
            spec(_STEP, "thumbnail", many, torch.int64, "their steps", "step"),
            spec(_TIME, "thumbnail", many, torch.float64, "their stream times", "seconds"),
        )

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Thumbnails | None:
        """Return those of a state; None if it has none.

        Raises:
            StateCorrupt: they are no small pictures, or not of this stream.
        """
        own = {name: tensor for name, tensor in tensors.items() if name in {_JPEG, _ENDS, _STEP, _TIME}}
        if not own:
            return None
        found = cls(MOST)
        found.check(own)
        found.take(own)
        return found

    def limited(self, most: int) -> Thumbnails:
        """Return them with another number to keep, from the next step on."""
        found = Thumbnails(most)
        found._kept = list(self._kept)
        return found

    @property
    def capacity_bytes(self) -> int:
        """The most bytes that they take in a state."""
        return (self.most + 1) * (MOST_BYTES + _BESIDE)

    def expected_bytes(self, steps: int) -> int:
        """Return about what they take in a state after so many steps, if they go on as until now."""
        count = math.ceil(steps / self._stride(steps)) + 1
        mean = sum(len(one.jpeg) for one in self._kept) / len(self._kept) if self._kept else MOST_BYTES
        return round(count * (mean + _BESIDE))

    def _stride(self, steps: int) -> int:
        stride = 1
        while math.ceil(steps / stride) > self.most:
            stride *= 2
        return stride

    def add(self, step: int, time_s: float, picture: Picture) -> None:
        """Take the picture (`shrink`) of a step; steps come in order."""
        stride = self._stride(step + 1)
        self._kept = [one for one in self._kept if one.step % stride == 0]
        if step % stride == 0:
            self._kept.append(Thumbnail(step, time_s, encode(picture)))
        self._last = (step, time_s, picture)

    def all(self) -> list[Thumbnail]:
        """Return them in the order of the stream."""
        if self._last is None or (self._kept and self._kept[-1].step == self._last[0]):
            return list(self._kept)
        step, time_s, picture = self._last
        return [*self._kept, Thumbnail(step, time_s, encode(picture))]

    def report(self) -> dict[str, Any]:
        """Return how many there are, their stream times, and their bytes."""
        found = self.all()
        return {"times_s": [one.time_s for one in found], "bytes": sum(len(one.jpeg) for one in found)}

    def held(self) -> dict[str, Tensor]:
        """Return all of them."""
        found = self.all()
        if not found:
            return {}
        return {
            _ENDS: torch.tensor([len(one.jpeg) for one in found]).cumsum(0),
            _JPEG: torch.frombuffer(bytearray(b"".join(one.jpeg for one in found)), dtype=torch.uint8),
            _STEP: torch.tensor([one.step for one in found]),
            _TIME: torch.tensor([one.time_s for one in found], dtype=torch.float64),
        }

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Check that they are small pictures, and in the order of the stream."""
        specs = Thumbnails.declare()
        if missing := {spec.name for spec in specs} - tensors.keys():
            raise StateCorrupt(f"state: tensor {min(missing)} is missing")
        check_shapes(tensor_shapes(tensors), specs)
        ends, steps, times_s = (tensors[name].tolist() for name in (_ENDS, _STEP, _TIME))
        sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        if not ends or ends[-1] != len(tensors[_JPEG]) or min(sizes) <= 0 or max(sizes) > MOST_BYTES:
            raise StateCorrupt(f"state: tensor {_ENDS} does not divide {_JPEG} into small files")
        for name, values in ((_STEP, steps), (_TIME, times_s)):
            if values != sorted(set(values)) or values[0] < 0:
                raise StateCorrupt(f"state: tensor {name} is not in the order of the stream")
        for one in _split(tensors):
            if not _is_small_jpeg(one.jpeg):
                raise StateCorrupt(f"state: tensor {_JPEG} holds something other than small pictures")

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Take checked ones."""
        self._kept, self._last = _split(tensors), None


def _split(tensors: Mapping[str, Tensor]) -> list[Thumbnail]:
    files = tensors[_JPEG].cpu().numpy().tobytes()
    ends = tensors[_ENDS].tolist()
    places = zip([0, *ends], ends, tensors[_STEP].tolist(), tensors[_TIME].tolist(), strict=False)
    return [Thumbnail(step, time_s, files[start:end]) for start, end, step, time_s in places]


def _is_small_jpeg(data: bytes) -> bool:
    from PIL import Image

    try:
        # Opening reads the head of the file only.
        with Image.open(io.BytesIO(data), formats=("JPEG",)) as image:
            return max(image.size) <= SIDE
    except Exception:  # Pillow raises more than its own errors on a damaged file
        return False


def shrink(image: Picture) -> Picture:
    """Return an RGB picture `[h, w, 3]`, uint8, with at most `SIDE` pixels a side; of more it keeps over half."""
    from PIL import Image

    # Means of whole blocks take a sixth of the time of a filter, and every step is shrunk: it may be the last one.
    return np.asarray(Image.fromarray(image).reduce(math.ceil(max(image.shape[:2]) / SIDE)))


def encode(picture: Picture) -> bytes:
    """Return a picture as a JPEG of at most `MOST_BYTES`; a busy one loses detail, and then size."""
    from PIL import Image

    image = Image.fromarray(picture)
    while True:
        for quality in _QUALITIES:
            file = io.BytesIO()
            image.save(file, "JPEG", quality=quality)
            if file.tell() <= MOST_BYTES:
                return file.getvalue()
        image = image.reduce(2)
