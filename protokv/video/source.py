"""What a video source is: frames in strictly increasing time, what is known beforehand, what was lost.

Times are seconds from the start of the video stream, taken from the container's timestamps, never from
`index / rate`. A source is read as often as wanted: every call of `frames` reads afresh, and `damage`
speaks of the latest reading. Pixels are uint8 RGB `[h, w, 3]`, turned the way the file says.
Knows nothing of models, sampling or memory; no torch in the interface.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

Image = NDArray[np.uint8]


class Frame:
    """One frame: `time_s` when it appears, `duration_s` how long it says it stays (None: not said).

    `image` is uint8 RGB `[h, w, 3]`. It may be given as a function, which is then called at most once, on
    first use: a frame that nobody looks at is never converted to RGB.
    """

    __slots__ = ("_image", "duration_s", "time_s")

    def __init__(self, time_s: float, image: Image | Callable[[], Image], duration_s: float | None = None) -> None:
        self.time_s = time_s
        self.duration_s = duration_s
        self._image = image

    @property
    def image(self) -> Image:
        """The picture, uint8 RGB `[h, w, 3]`."""
        if not isinstance(self._image, np.ndarray):
            self._image = self._image()
        return self._image


@dataclass(frozen=True)
class SourceInfo:
    """What is known of a source when it is opened. The same file gives the same info, however it is read."""

    name: str  # file name without its folder
    kind: str  # "file"
    decoder: str  # "decord" or "pyav": the decoder that was chosen on opening
    container: str  # FFmpeg's name of the container format
    codec: str  # FFmpeg's name of the codec
    pixel_format: str
    width: int  # pixels as shown, after rotation
    height: int
    rotation: int  # degrees counter-clockwise that the file asks for and that `image` has had: 0, 90, 180, 270
    rate_fps: float | None  # average frames a second, as the file says; None: not said
    duration_s: float | None  # as the file says; None: not said
    size_bytes: int
    fingerprint: str  # sha256 of the size, the first and the last MiB

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Damage:
    """What a reading could not give. `message` is one sentence for a user, empty where all is well."""

    frames_lost: int = 0  # frames that the file holds or promises and that no decoder gave
    frames_damaged: int = 0  # frames given that their container or decoder had marked as corrupt
    lost_from_s: float | None = None  # stream time of the first lost or damaged frame
    message: str = ""

    @property
    def ok(self) -> bool:
        """Nothing was lost or damaged."""
        return self.frames_lost == 0 and self.frames_damaged == 0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, with `ok`."""
        return {**asdict(self), "ok": self.ok}


class Source(Protocol):
    """A readable video. A context manager; `close` may be called more than once."""

    @property
    def info(self) -> SourceInfo:
        """What opening found out; the same for every reading."""
        ...

    @property
    def damage(self) -> Damage:
        """Of the latest reading, so far; final once `frames` is exhausted. Times before its start do not count."""
        ...

    @property
    def frames_by_decoder(self) -> dict[str, int]:
        """Frames that each decoder really gave in the latest reading."""
        ...

    def frames(self, start_s: float = 0.0) -> Iterator[Frame]:
        """Frames in strictly increasing time, beginning with the one shown at `start_s`."""
        ...

    def close(self) -> None:
        """End any reading before its next frame."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def from_shown_at(frames: Iterable[Frame], start_s: float) -> Iterator[Frame]:
    """Drop what is over before `start_s`: the first frame given is the last one with `time_s <= start_s`."""
    held: Frame | None = None
    for frame in frames:
        if frame.time_s <= start_s:
            held = frame
            continue
        if held is not None:
            yield held
            held = None
        yield frame
    if held is not None:
        yield held
