"""A source that is read in a process of its own: `Source` on this side, `protokv.video.worker` on the other.

A decoder that crashes, hangs or takes too much memory takes only that process with it, a waiting reader can be told to
stop, and the next frames are decoded while the caller works on the last ones: at most a handful, in order, the
same as without. What a dead decoder did not give is damage. Starting the process costs about a third of a second.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from protokv.errors import SourceUnreadable
from protokv.video.address import PIPE, duplicate, kind_of, shown
from protokv.video.process import Dead, Stopped, Worker
from protokv.video.source import Closing, Damage, Frame, ShouldStop, SourceInfo, never

# A decoder that says nothing for so long hangs.
STALL_S = 30.0


class IsolatedSource(Closing):
    """Reads what `opener` opens, in a process of its own. See `Source` for the contract.

    Args:
        source: the source's text.
        opener: `module:function` that opens it there, called with `source` and `kwargs`.
        stall_s: seconds without a sign of life after which the process is ended.
        should_stop: asked while waiting for the source to open; once it says yes, that is given up.
        kwargs: plain JSON.

    Raises:
        SourceError: As the opener; SourceUnreadable where it made the process die or hang.
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        *,
        opener: str = "protokv.video.registry:open_source",
        stall_s: float = STALL_S,
        should_stop: ShouldStop = never,
        **kwargs: Any,
    ) -> None:
        self._source = os.fspath(source)
        self._piped: int | None = None
        if kind_of(self._source) == PIPE:
            # Stdin of the process is for requests, so what comes in at ours needs a number of its own.
            self._piped = duplicate(self._source)
        inherited = self._source if self._piped is None else f"{PIPE}:{self._piped}"
        self._opening = {"source": inherited, "opener": opener, "kwargs": kwargs}
        self._stall_s = stall_s
        self._damage = Damage()
        self._worker, self.info = self._start(should_stop)

    @property
    def damage(self) -> Damage:
        """What the latest reading has lost so far."""
        return self._damage

    def frames(
        self,
        start_s: float = 0.0,
        *,
        fps: float | None = None,
        from_beginning: bool = False,
        should_stop: ShouldStop = never,
    ) -> Iterator[Frame]:
        """See `Source`. With `fps`, only what is shown at multiples of `1 / fps` passes between the processes."""
        self._check_open(self.info.name)
        request = {"start_s": float(start_s), "fps": fps, "from_beginning": from_beginning}
        return self._read(request, lambda: self._closed or should_stop())

    def close(self) -> None:
        """End any reading, and the process."""
        super().close()
        self._worker.end()
        if self._piped is not None:
            with contextlib.suppress(OSError):
                os.close(self._piped)
            self._piped = None

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):
            self._worker.end()

    def _start(self, should_stop: ShouldStop = never) -> tuple[Worker, SourceInfo]:
        worker = Worker(() if self._piped is None else (self._piped,))
        worker.ask(self._opening)
        try:
            header, _ = worker.take(self._stall_s, should_stop)
            return worker, SourceInfo(**header["info"])
        except Dead as dead:
            raise SourceUnreadable(
                f"{shown(self._source)} cannot be opened: {dead}", hint="it is damaged, or made to do harm"
            ) from None
        except Stopped:
            worker.end()
            raise SourceUnreadable(f"{shown(self._source)} was not waited for") from None
        except BaseException:
            worker.end()
            raise

    def _read(self, request: dict[str, Any], should_stop: ShouldStop) -> Iterator[Frame]:
        if self._worker.busy:
            self._worker.end()
            self._worker, _ = self._start()
        worker = self._worker
        worker.busy, self._damage = True, Damage()
        worker.ask(request)
        at_s: float | None = None
        while True:
            try:
                header, image = worker.take(self._stall_s, should_stop)
            except Stopped:
                worker.end()
                return
            except Dead as dead:
                if at_s is None and request["start_s"] <= 0:
                    raise SourceUnreadable(f"{self.info.name} cannot be read: {dead}") from None
                self._damage = _cut_short(self._damage, self.info, at_s or request["start_s"], str(dead))
                return
            self._damage = Damage(**header["damage"])
            if image is None:
                worker.busy = False
                return
            at_s = header["time_s"]
            yield Frame(header["time_s"], image, header["duration_s"], header["decoder"])
            if worker is not self._worker:
                return  # another reading has begun


def _cut_short(damage: Damage, info: SourceInfo, at_s: float, why: str) -> Damage:
    """The damage of a reading that ended after `at_s` because the decoder did."""
    rest_s = (info.duration_s or 0.0) - at_s
    lost = max(1, round(rest_s * (info.rate_fps or 1.0)))
    message = f"{damage.message + '; ' if damage.message else ''}{why} after {at_s:.2f} s, and the rest was not read"
    from_s = at_s if damage.lost_from_s is None else damage.lost_from_s
    return replace(damage, frames_lost=damage.frames_lost + lost, lost_from_s=from_s, message=message)
