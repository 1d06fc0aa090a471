"""What a video source is: frames in strictly increasing time, what is known beforehand, what was lost.

Times are seconds from the start of the stream, taken from time stamps, never from `index / rate`. A file may be read
as often as wanted: every call of `frames` reads afresh, and `damage` speaks of the latest reading. What cannot be
read twice (a pipe, a camera) is not `seekable`, and may have no duration, size or fingerprint. Pixels are uint8 RGB
`[h, w, 3]`, turned the way the source says. Knows nothing of models, sampling or memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from protokv.errors import SourceUnreadable

Image = NDArray[np.uint8]
ShouldStop = Callable[[], bool]


def never() -> bool:
    """Do not stop."""
    return False


class Frame:
    """One frame: `time_s` when it appears, `duration_s` how long it says it stays (None: not said).

    `image` is uint8 RGB `[h, w, 3]`. It may be given as a function, which is then called at most once, on
    first use: a frame that nobody looks at is never converted to RGB. `decoder` is what really decoded it.
    """

    __slots__ = ("_image", "decoder", "duration_s", "time_s")

    def __init__(
        self,
        time_s: float,
        image: Image | Callable[[], Image],
        duration_s: float | None = None,
        decoder: str = "none",
    ) -> None:
        self.time_s = time_s
        self.duration_s = duration_s
        self.decoder = decoder
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
    kind: str  # one of `protokv.video.registry.SOURCES`
    decoder: str  # the decoder that was asked for; who really decoded is in `Step.decoders`
    container: str  # FFmpeg's name of the container format
    codec: str  # FFmpeg's name of the codec
    pixel_format: str
    width: int  # pixels as shown, after rotation
    height: int
    rotation: int  # degrees counter-clockwise that the file asks for and that `image` has had: 0, 90, 180, 270
    rate_fps: float | None  # average frames a second, as the source says; None: not said
    duration_s: float | None = None  # as the source says; None: not said, or without end
    size_bytes: int | None = None
    fingerprint: str | None = None  # tells contents apart; a source without one is equal to no other
    seekable: bool = True  # whether it can be read more than once, and from a later time
    comment: str | None = None  # what the file says of itself, the beginning of it

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Damage:
    """What a reading could not give. `message` is one sentence for a user, empty where all is well."""

    frames_lost: int = 0  # frames that the source holds or promises and that no decoder gave
    frames_damaged: int = 0  # frames given that their container or decoder had marked as corrupt
    lost_from_s: float | None = None  # stream time of the first lost or damaged frame
    message: str = ""

    @property
    def ok(self) -> bool:
        """Nothing was lost or damaged."""
        return self.frames_lost == 0 and self.frames_damaged == 0

    @classmethod
    def from_dict(cls, data: object) -> Damage:
        """The inverse of `to_dict`; nothing was damaged where `data` is no such record."""
        record = data if isinstance(data, dict) else {}
        lost, damaged, from_s = (record.get(name) for name in ("frames_lost", "frames_damaged", "lost_from_s"))
        found = cls(
            frames_lost=lost if type(lost) is int else 0,
            frames_damaged=damaged if type(damaged) is int else 0,
            lost_from_s=from_s if type(from_s) is float else None,
            message=str(record.get("message") or "damaged"),
        )
        return cls() if found.ok else found

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

    def frames(
        self,
        start_s: float = 0.0,
        *,
        fps: float | None = None,
        from_beginning: bool = False,
        should_stop: ShouldStop = never,
    ) -> Iterator[Frame]:
        """Frames in strictly increasing time, beginning with the one shown at `start_s`.

        Args:
            start_s: stream time to begin at.
            fps: only what is shown at multiples of `1 / fps` will be looked at: a source may leave out the rest, but
                not the last frame.
            from_beginning: do not seek but decode all that comes before `start_s`, and account for it in `damage`:
                so a damaged file gives the very frames that an uninterrupted reading gives.
            should_stop: asked between frames and, at least every second, while waiting for one; once it says yes,
                the frames end.

        Raises:
            SourceUnreadable: the source is closed, or gone.
        """
        ...

    def close(self) -> None:
        """End any reading before its next frame."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Closing:
    """What closing means to every source: whoever closes it, or leaves its context, ends any reading."""

    _closed = False

    def close(self) -> None:
        """End any reading before its next frame."""
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self, name: str) -> None:
        """SourceUnreadable once the source is closed."""
        if self._closed:
            raise SourceUnreadable(f"{name} was closed", hint="open the source again")


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
