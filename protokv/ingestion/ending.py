"""When a run ends by itself: after so much of the stream, or at a real time. Knows no sources."""

from __future__ import annotations

import time
from collections.abc import Callable


class Ending:
    """Asked over and over whether it is time.

    Attributes:
        over: it was.
    """

    def __init__(
        self,
        for_s: float | None,
        until: float | None,
        from_s: float,
        *,
        live: bool,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Time runs from now.

        Args:
            for_s: so much of the stream; None: no end.
            until: seconds since 1970; None: no end.
            from_s: stream time now.
            live: real time counts as well, for the stream stands still while its source is lost.
            clock: seconds that only go forward.
            now: seconds since 1970.
        """
        self._for_s, self._until, self._from_s = for_s, until, from_s
        self._live, self._clock, self._now = live, clock, now
        self._began_s = clock()
        self.over = False

    def reached(self, stream_s: float) -> bool:
        """Whether it is time, at this stream time."""
        gone_s = stream_s - self._from_s
        if self._live:
            gone_s = max(gone_s, self._clock() - self._began_s)
        self.over = (
            self.over
            or (self._for_s is not None and gone_s >= self._for_s)
            or (self._until is not None and self._now() >= self._until)
        )
        return self.over
