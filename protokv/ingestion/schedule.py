"""When to commit on the way (`Every`) and when a run ends by itself (`Ending`). Knows no states and no sources."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from protokv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Every:
    """Commit after `seconds` of stream time, after `n_steps`, or after `wall_s` of real time; with none of them, never.

    By real time, other steps are committed in every run; the state at the end is the same.
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
        """Return True if a commit is due, this much after the last one."""
        return n_steps >= (self.n_steps or inf) or seconds >= (self.seconds or inf) or wall_s >= (self.wall_s or inf)


MINUTELY = Every(wall_s=60.0)
"""The default: a kill loses little, and a commit a minute costs little."""

LIVE = Every(wall_s=5.0)
"""The default of live sources: questions are about what has just happened."""

NEVER = Every()
"""Only at the end."""


class Ending:
    """Decides whether a run has reached its end.

    Attributes:
        over: it has.
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
        """Begin now.

        Args:
            for_s: stream time to watch; None: no end.
            until: real time to end at, in seconds since 1970; None: no end.
            from_s: stream time now.
            live: `for_s` counts real time too, because stream time stands still while a source is lost.
            clock: seconds that only go forward.
            now: seconds since 1970.
        """
        self._for_s, self._until, self._from_s = for_s, until, from_s
        self._live, self._clock, self._now = live, clock, now
        self._began_s = clock()
        self.over = False

    def reached(self, stream_s: float) -> bool:
        """Return True if the run is to end, at this stream time."""
        gone_s = stream_s - self._from_s
        if self._live:
            gone_s = max(gone_s, self._clock() - self._began_s)
        self.over = (
            self.over
            or (self._for_s is not None and gone_s >= self._for_s)
            or (self._until is not None and self._now() >= self._until)
        )
        return self.over
