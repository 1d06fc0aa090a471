"""`Source`, the interface of all video sources, and `SourceSlice`, a part of one: frames in
strictly increasing time.

Times are seconds from the start of the stream, from time stamps and never from `index / rate`. A
file may be read more than once: every call of `frames` reads afresh, and `damage` is that of the
latest reading. A pipe or a camera is not `seekable` and may have no duration, size or fingerprint.
Knows no models, sampling or memory.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from protokv.errors import ConfigError, SourceUnreadable
from protokv.texts import JsonObject

Image = NDArray[np.uint8]
ShouldStop = Callable[[], bool]

# Notes of a source; the joins of a damaged file may be many.
_MOST_NOTES = 8


def never_stop() -> bool:
    """Do not stop."""
    return False


class Frame:
    """One frame: `time_s` when it appears, `duration_s` how long it says that it stays (None: not
    said).

    `image` is uint8 RGB `[h, w, 3]`, turned the way the source says. It may be given as a function,
    which is called at most once, on first use: a frame that nobody looks at is never converted.
    `decoder` is the one that decoded it.
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

    def move(self, time_s: float, duration_s: float | None) -> Frame:
        """Return the frame at another time."""
        return Frame(time_s, lambda: self.image, duration_s, self.decoder)


@dataclass(frozen=True)
class SourceInfo:
    """Facts about a source, known when it is opened. The same file gives the same info, however it
    is read.
    """

    name: str  # file name without its folder
    kind: str  # as `protokv.video.address.source_kind`
    decoder: str  # the requested decoder; `VideoStep.decoders` names those that really decoded
    container: str  # FFmpeg's name of the container format
    codec: str  # FFmpeg's name of the codec
    pixel_format: str
    width: int  # square pixels as shown, after rotation
    height: int
    # degrees counter-clockwise that the file asks for and that `image` has had: 0, 90, 180, 270
    rotation: int
    rate_fps: float | None  # average frames a second, as the source says; None: not said
    duration_s: float | None = None  # as the source says; None: not said, or without end
    size_bytes: int | None = None
    # tells contents apart; a source without one is equal to no other
    fingerprint: str | None = None
    seekable: bool = True  # whether it can be read more than once, and from a later time
    mirrored: bool = False  # `image` was mirrored left to right before it was turned
    # its container says that it is of the drawn world, which the embedded models can read
    drawn: bool = False


@dataclass(frozen=True)
class SourceDamage:
    """Frames that a reading could not give. `message` is one sentence for a user, empty if nothing
    is damaged.
    """

    frames_lost: int = 0  # frames that the source holds or promises and that no decoder gave
    frames_damaged: int = 0  # frames given that their container or decoder had marked as corrupt
    lost_from_s: float | None = None  # stream time of the first lost or damaged frame
    message: str = ""

    @property
    def ok(self) -> bool:
        """Nothing was lost or damaged."""
        return self.frames_lost == 0 and self.frames_damaged == 0

    @classmethod
    def from_dict(cls, data: object) -> SourceDamage:
        """Invert `to_dict`; give no damage if `data` is no such record."""
        try:
            return msgspec.convert(data, cls)
        except msgspec.ValidationError:
            return cls()

    def to_dict(self) -> JsonObject:
        """Plain JSON, with `ok`."""
        return {**asdict(self), "ok": self.ok}


class TextTrack(NamedTuple):
    """A text track of a container. All texts of it are untrusted."""

    number: int  # its index in the container
    codec: str  # FFmpeg's name
    language: str  # as the container says, such as "eng"; empty: not said
    default: bool = False
    forced: bool = False  # only what needs a translation


class SubtitleLine(NamedTuple):
    """What is shown from `start_s` to `end_s` of the source, in one or more rows, with the markup
    of WebVTT.
    """

    start_s: float
    end_s: float
    text: str

    def shift(self, by_s: float) -> SubtitleLine:
        """Return the line that much later."""
        return SubtitleLine(self.start_s + by_s, self.end_s + by_s, self.text)


class SubtitleLines(NamedTuple):
    """The lines of a track or a file, in its order."""

    lines: tuple[SubtitleLine, ...]
    lost: str = ""  # the lines that are missing
    note: str = ""  # a doubt about the text

    def since(self, start_s: float) -> SubtitleLines:
        """Return those of the part of the source that begins at `start_s`, in its own time."""
        return self._replace(
            lines=tuple(line.shift(-start_s) for line in self.lines if line.end_s > start_s)
        )


class FrameRequest(NamedTuple):
    """The arguments of `Source.frames`."""

    start_s: float
    from_beginning: bool
    should_stop: ShouldStop  # True for a closed source too


class Source(ABC):
    """A readable video, and a context manager. A kind of source defines `_read` and `damage`."""

    info: SourceInfo  # facts that opening found out; the same for every reading
    texts: tuple[TextTrack, ...] = ()  # the text tracks of its container, if it is a file
    _notes: tuple[str, ...] = ()
    _closed = False

    def close(self) -> None:
        """End any reading before its next frame. May be called more than once."""
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for a user about the source that are no damage. Reading may add some."""
        return self._notes

    def add_note(self, note: str) -> None:
        """Note what a user should know, once."""
        if note not in self._notes and len(self._notes) < _MOST_NOTES:
            self._notes = (*self._notes, note)

    @property
    @abstractmethod
    def damage(self) -> SourceDamage:
        """Damage of the latest reading until now, from its start on; final once `frames` has
        ended.
        """

    def frames(
        self,
        start_s: float = 0.0,
        *,
        from_beginning: bool = False,
        should_stop: ShouldStop = never_stop,
    ) -> Iterator[Frame]:
        """Give frames in strictly increasing time, beginning with the one shown at stream time
        `start_s`.

        A source that is not seekable goes on where it stands. With `from_beginning` everything
        before `start_s` is decoded, and its damage counts: so a damaged file gives the frames of an
        uninterrupted reading. The frames end once `should_stop` returns True, which is asked
        between them and, at least every second, while waiting for one. SourceUnreadable: the source
        is closed, or gone.
        """
        if self._closed:
            raise SourceUnreadable(f"{self.info.name} was closed", hint="open the source again")
        start_s = max(0.0, float(start_s))
        return self._read(
            FrameRequest(start_s, from_beginning, lambda: self._closed or should_stop())
        )

    def lines(self, number: int) -> SubtitleLines:
        """Read the text track with this number, one of `texts`, before any frames; SourceUnreadable
        if it cannot be.
        """
        raise SourceUnreadable(f"{self.info.name} has no text track {number}")

    @abstractmethod
    def _read(self, wanted: FrameRequest) -> Iterator[Frame]:
        """Give the frames of `frames`."""


def drop_frames_before(frames: Iterable[Frame], start_s: float) -> Iterator[Frame]:
    """Drop frames that are over before `start_s`: begin with the last one whose `time_s <=
    start_s`.
    """
    last: Frame | None = None
    for frame in frames:
        if frame.time_s > start_s:
            yield from filter(None, (last, frame))
        last = frame if frame.time_s <= start_s else None
    if last is not None:
        yield last


class SourceSlice(Source):
    """The part of a seekable source from `start_s` on, for `duration_s` (None: to its end); its
    times begin at 0.

    Its fingerprint names start and duration. Damage before or after it does not count. The source
    is closed with it. ConfigError: the source is not seekable, or ends before the part begins.
    """

    def __init__(
        self, source: Source, start_s: float = 0.0, duration_s: float | None = None
    ) -> None:
        self._source = source
        self._start_s = start_s
        self._end_s = math.inf if duration_s is None else duration_s
        self.texts = source.texts
        info = source.info
        if not info.seekable:
            raise ConfigError(
                f"{info.name} cannot be read in parts", hint="leave out --start and --duration"
            )
        if info.duration_s is not None and start_s >= info.duration_s:
            raise ConfigError(
                f"{info.name} is {info.duration_s:g} s long, and the part begins at {start_s:g} s",
                hint="use an earlier --start",
            )
        name = f"{info.name} from {start_s:g} s"
        part = f"{info.fingerprint}@{start_s:.6f}+"
        if duration_s is not None:
            name += f" for {duration_s:g} s"
            part += f"{duration_s:.6f}"
        if info.duration_s is not None:
            duration_s = min(info.duration_s - start_s, self._end_s)
        digest = info.fingerprint and part
        self.info = replace(info, name=name, duration_s=duration_s, fingerprint=digest)

    @property
    def notes(self) -> tuple[str, ...]:
        """See `Source`."""
        return self._source.notes

    @property
    def damage(self) -> SourceDamage:
        """See `Source`; in the part's own time."""
        found = self._source.damage
        if found.lost_from_s is None:
            return found
        return replace(found, lost_from_s=max(0.0, found.lost_from_s - self._start_s))

    def lines(self, number: int) -> SubtitleLines:
        """See `Source`; in the part's own time."""
        return self._source.lines(number).since(self._start_s)

    def _read(self, wanted: FrameRequest) -> Iterator[Frame]:
        last = None
        frames = self._source.frames(
            wanted.start_s + self._start_s,
            from_beginning=wanted.from_beginning,
            should_stop=wanted.should_stop,
        )
        for frame in frames:
            time_s = max(0.0, frame.time_s - self._start_s)
            if time_s >= self._end_s:
                if last is not None:
                    yield last.move(last.time_s, self._end_s - last.time_s)
                return
            if last is not None:
                yield last
            stays_s = frame.duration_s and min(frame.duration_s, self._end_s - time_s)
            last = frame.move(time_s, stays_s)
        if last is not None:
            yield last

    def close(self) -> None:
        """End any reading, and the source."""
        super().close()
        self._source.close()
