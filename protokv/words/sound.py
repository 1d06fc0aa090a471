"""The sound of a video with PyAV, in pieces that are cut where it is quiet. Knows no speech.

A piece follows from the sound before it alone, which is always decoded from the beginning: a reading that begins later
gives the same pieces. Pieces in which nothing is heard are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import Any

import av
import numpy as np

from protokv.errors import SourceUnreadable
from protokv.video.container import only, reason
from protokv.video.source import Samples, ShouldStop, Sound, never

# The quietest of these many seconds in the last two thirds of a piece is where it ends.
QUIET_S = 0.1

# The root of the mean square below which nothing is heard, of the loudest `QUIET_S`; speech has 100 times as much.
SILENT = 32.0

# A time stamp that is further than this from the end of the sound before it moves the sound, in seconds.
JUMP_S = 0.2


class Cutter:
    """Cuts sound into pieces.

    Args:
        rate: samples a second.
        longest_s: of a piece, in seconds.
        from_s: pieces that end before are not given.
    """

    def __init__(self, rate: int, longest_s: float, from_s: float = 0.0) -> None:
        self._rate, self._most, self._from_s = rate, round(longest_s * rate), from_s
        self._held: Samples = np.empty(0, np.int16)
        self._begins_s, self._given = 0.0, 0

    @property
    def cut_s(self) -> float:
        """Where the next piece begins."""
        return self._begins_s + self._given / self._rate

    @property
    def end_s(self) -> float:
        """Where the sound so far ends."""
        return self.cut_s + len(self._held) / self._rate

    def move(self, time_s: float) -> Iterator[Sound]:
        """End the sound so far; what follows begins at this time."""
        yield from self.end()
        self._begins_s, self._given = time_s, 0

    def add(self, samples: Samples) -> Iterator[Sound]:
        """Add samples, int16 `[n]`; give the pieces that are complete."""
        self._held = np.concatenate((self._held, samples))
        while len(self._held) >= self._most:
            yield from self._cut(self._quietest())

    def end(self) -> Iterator[Sound]:
        """Give the last piece."""
        yield from self._cut(len(self._held))

    def _quietest(self) -> int:
        first = self._most // 3
        loud = _loudness(self._held[first : self._most], self._rate)
        last = len(loud) - 1 - int(loud[::-1].argmin())
        return first + round((last + 0.5) * QUIET_S * self._rate)

    def _cut(self, n: int) -> Iterator[Sound]:
        samples, self._held = self._held[:n], self._held[n:]
        found = Sound(self.cut_s, self._rate, samples)
        self._given += n
        if n and found.end_s > self._from_s and _loudness(samples, self._rate).max(initial=0.0) > SILENT:
            yield found


def _loudness(samples: Samples, rate: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the root of the mean square of each whole `QUIET_S`."""
    size = round(QUIET_S * rate)
    whole = samples[: len(samples) // size * size].astype(np.float64)
    loud: np.ndarray[Any, np.dtype[np.float64]] = np.sqrt(np.square(whole).reshape(-1, size).mean(1))
    return loud


class Ear:
    """Makes pieces of the packets of one track.

    Args:
        rate: as for `Cutter`.
        longest_s: as for `Cutter`.
        from_s: as for `Cutter`.
        origin_s: the time stamp at which the video begins.
        anew_s: time stamps that run back by more than this begin a new count.

    Attributes:
        damaged: why the first packet of those that cannot be decoded cannot; empty: all can.
    """

    def __init__(
        self, rate: int, longest_s: float, from_s: float = 0.0, origin_s: float = 0.0, anew_s: float = inf
    ) -> None:
        self._rate, self._origin_s, self._anew_s = rate, origin_s, anew_s
        self._cutter = Cutter(rate, longest_s, from_s)
        self._resampler: Any = None
        self._form: tuple[str, str, int] | None = None
        self.damaged = ""

    @property
    def until_s(self) -> float:
        """Until when all pieces were given."""
        return self._cutter.cut_s

    def add(self, packet: Any) -> Iterator[Sound]:
        """Decode a packet; give the pieces that are complete."""
        try:
            for frame in packet.decode():
                yield from self._add(frame)
        except Exception as error:  # PyAV raises more than its own errors on a damaged packet
            self.damaged = self.damaged or reason(error)

    def end(self) -> Iterator[Sound]:
        """Give the last pieces."""
        yield from self._resampled(None)
        yield from self._cutter.end()

    def _add(self, frame: Any) -> Iterator[Sound]:
        end_s = self._cutter.end_s
        time_s = end_s if frame.time is None else frame.time - self._origin_s
        if JUMP_S < end_s - time_s <= self._anew_s:
            return  # what was heard already, or before the video
        form = (frame.format.name, frame.layout.name, frame.sample_rate)
        if form != self._form or abs(time_s - end_s) > JUMP_S:
            yield from self._resampled(None)
            end_s = self._cutter.end_s
            yield from self._cutter.move(time_s if end_s - time_s > self._anew_s else max(time_s, end_s))
            self._resampler, self._form = av.AudioResampler("s16", "mono", self._rate), form
        yield from self._resampled(frame)

    def _resampled(self, frame: Any) -> Iterator[Sound]:
        """Cut a frame, or what the resampler still holds (None)."""
        for one in () if self._resampler is None else self._resampler.resample(frame):
            yield from self._cutter.add(one.to_ndarray()[0])


def track_of_sound(container: Any, video: Any = None) -> Any:
    """Return the track of a container that goes with its video. SourceUnreadable if there is none."""
    stream = container.streams.best("audio", related=video)
    if stream is None or stream.codec_context is None:
        raise SourceUnreadable("the video has no sound")
    return stream


def sound_of(container: Any, ear: Ear, should_stop: ShouldStop = never) -> Iterator[Sound]:
    """Give the sound of a file that was just opened, of its default track.

    Raises:
        SourceUnreadable: it has none, or the file cannot be read on; what was read was given.
    """
    stream = track_of_sound(container)
    only(container, stream)
    try:
        for packet in container.demux(stream):
            if should_stop():
                return
            yield from ear.add(packet)
    except Exception as error:
        ear.damaged = ear.damaged or reason(error)
    yield from ear.end()
    if ear.damaged:
        raise SourceUnreadable(f"the sound is damaged: {ear.damaged}")
