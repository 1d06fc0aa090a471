"""Sources made of another source: `Part`, a part of one, and `ObjectSource`, the copy of an object of a store.

A part has times that begin at 0. Its fingerprint names start and duration, so it differs from the whole and from other
parts. Damage before or after the part does not count.

Objects are copied into a temporary file, because decoders seek, and FFmpeg's own readers of object stores do not know
our credentials and endpoints. So the disk must hold one video per open source. The fingerprint comes from metadata of
the store: it is known without a copy, and differs from that of the same video in a file.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path, PurePosixPath

from protokv.errors import ConfigError, SourceError, SourceUnreadable
from protokv.video.bucket import fetch
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
        return [(number, one.moved(-start_s)) for number, one in found if one.end_s > start_s]

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
        held: Frame | None = None
        for frame in frames:
            time_s = max(0.0, frame.time_s - self._start_s)
            if time_s >= end_s:
                if held is not None:
                    yield _moved(held, held.time_s, end_s - held.time_s)
                return
            if held is not None:
                yield held
            held = _moved(frame, time_s, frame.duration_s)
        if held is not None:
            most_s = None if held.duration_s is None else min(held.duration_s, end_s - held.time_s)
            yield _moved(held, held.time_s, most_s)

    def close(self) -> None:
        """End any reading, and the source."""
        super().close()
        self._source.close()


def _moved(frame: Frame, time_s: float, duration_s: float | None) -> Frame:
    return Frame(time_s, lambda: frame.image, duration_s, frame.decoder)


class ObjectSource(Source):
    """The video at an address. See `Source` for the contract.

    Args:
        address: `s3://BUCKET/KEY`, `gs://...` or `az://...`.
        open_copy: opens the file into which the object is copied.

    Raises:
        SourceError: as for a file, or the store cannot be read.
    """

    def __init__(self, address: str, open_copy: Callable[[Path], Source]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="protokv-", ignore_cleanup_errors=True)
        path = Path(self._folder.name, PurePosixPath(address).name or "video")
        with ExitStack() as on_error:
            on_error.callback(self._folder.cleanup)
            try:
                fingerprint = fetch(address, path)
                self._file = open_copy(path)
            except SourceError as error:
                raise type(error)(error.message.replace(str(path), address), hint=error.hint) from error
            except OSError as error:
                raise SourceUnreadable(
                    f"cannot copy {address} to {path.parent}: {error.strerror or error}",
                    hint="make room there, or name another folder with TMPDIR",
                ) from error
            on_error.pop_all()
        self.info = replace(self._file.info, kind=address.partition("://")[0], fingerprint=fingerprint)
        self.texts, self.lines = self._file.texts, self._file.lines  # type: ignore[method-assign]

    @property
    def damage(self) -> Damage:
        """See `Source`."""
        return self._file.damage

    def _read(self, wanted: FrameRequest) -> Iterator[Frame]:
        start_s, fps, from_beginning, should_stop = wanted
        return self._file.frames(start_s, fps=fps, from_beginning=from_beginning, should_stop=should_stop)

    def close(self) -> None:
        """End any reading, and remove the copy."""
        super().close()
        self._file.close()
        self._folder.cleanup()
