"""`Part`: a part of a source, with times that begin at 0.

Its fingerprint names start and duration, so it differs from the whole and from other parts. Damage before or after the
part does not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from protokv.errors import ConfigError
from protokv.video.source import Damage, Frame, FrameRequest, Line, Lines, Source


class Part(Source):
    """See `Source` for the contract.

    Args:
        source: the whole source; closed with the part.
        start_s: where the part begins, in the time of the source.
        duration_s: how long it is; None: to the end of the source.

    Raises:
        ConfigError: the source is not seekable, or ends before the part begins.
    """

    def __init__(self, source: Source, start_s: float = 0.0, duration_s: float | None = None) -> None:
        self._source, self._start_s, self._duration_s = source, start_s, duration_s
        info = source.info
        if not info.seekable:
            raise ConfigError(f"{info.name} cannot be read in parts", hint="leave out --start and --duration")
        if duration_s is not None and not duration_s > 0:
            raise ConfigError(f"a part of {duration_s:g} s holds nothing", hint="use a --duration above 0")
        if info.duration_s is not None and start_s >= info.duration_s:
            raise ConfigError(
                f"{info.name} is {info.duration_s:g} s long, and the part begins at {start_s:g} s",
                hint="use an earlier --start",
            )
        left_s = None if info.duration_s is None else info.duration_s - start_s
        lengths = [length for length in (left_s, duration_s) if length is not None]
        part = f"{start_s:.6f}+{'' if duration_s is None else f'{duration_s:.6f}'}"
        length = "" if duration_s is None else f" for {duration_s:g} s"
        self.info = replace(
            info,
            name=f"{info.name} from {start_s:g} s{length}",
            duration_s=min(lengths, default=None),
            fingerprint=None if info.fingerprint is None else f"{info.fingerprint}@{part}",
        )
        self.texts, self.streams_text = source.texts, source.streams_text

    @property
    def notes(self) -> tuple[str, ...]:
        """See `Source`."""
        return self._source.notes

    @property
    def damage(self) -> Damage:
        """See `Source`; in the part's own time."""
        found = self._source.damage
        if found.lost_from_s is None:
            return found
        return replace(found, lost_from_s=max(0.0, found.lost_from_s - self._start_s))

    def lines(self, number: int) -> Lines:
        """See `Source`; in the part's own time."""
        return self._source.lines(number).since(self._start_s)

    def new_lines(self) -> Sequence[tuple[int, Line]]:
        """See `Source`; in the part's own time."""
        start_s, found = self._start_s, self._source.new_lines()
        return [(number, one.shift(-start_s)) for number, one in found if one.end_s > start_s]

    def _read(self, wanted: FrameRequest) -> Iterator[Frame]:
        fps = wanted.fps
        # The part has the sampling times of the source only if it begins at one.
        aligned = fps is not None and abs(self._start_s * fps - round(self._start_s * fps)) < 1e-9
        frames = self._source.frames(
            self._start_s + wanted.start_s,
            fps=fps if aligned else None,
            from_beginning=wanted.from_beginning,
            should_stop=wanted.should_stop,
        )
        end_s = float("inf") if self._duration_s is None else self._duration_s
        last: Frame | None = None
        for frame in frames:
            time_s = max(0.0, frame.time_s - self._start_s)
            if time_s >= end_s:
                if last is not None:
                    yield _shift(last, last.time_s, end_s - last.time_s)
                return
            if last is not None:
                yield last
            last = _shift(frame, time_s, frame.duration_s)
        if last is not None:
            most_s = None if last.duration_s is None else min(last.duration_s, end_s - last.time_s)
            yield _shift(last, last.time_s, most_s)

    def close(self) -> None:
        """End any reading, and the source."""
        super().close()
        self._source.close()


def _shift(frame: Frame, time_s: float, duration_s: float | None) -> Frame:
    return Frame(time_s, lambda: frame.image, duration_s, frame.decoder)
