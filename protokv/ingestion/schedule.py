"""How often to commit on the way. Knows no states and no sources.

When a run ends by itself: after so much of the stream, or at a real time. Knows no sources.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from protokv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Every:
    """After so much stream time, so many steps, or so much time of the clock on the wall; without any of them, never.

    Commits change nothing of what comes after them: which steps are committed by the clock differs from run to run, the
    state that a stream ends in does not.
    """

    seconds: float | None = None
    n_steps: int | None = None
    wall_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("seconds", "n_steps", "wall_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < inf:
                raise ConfigError(f"cannot commit every {value:g}", hint="use a time or a number of steps above 0")

    def due(self, n_steps: int, seconds: float, wall_s: float) -> bool:
        """Whether to commit, so much after the last commit."""
        return n_steps >= (self.n_steps or inf) or seconds >= (self.seconds or inf) or wall_s >= (self.wall_s or inf)


MINUTELY = Every(wall_s=60.0)
"""The default: little is lost by a kill, and a commit a minute costs a fast stream nothing to speak of."""

LIVE = Every(wall_s=5.0)
"""The default of live sources: who asks, asks about what has just happened."""

NEVER = Every()
"""Only at the end."""


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
