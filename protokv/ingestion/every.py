"""How often to commit on the way. Knows no states and no sources."""

from __future__ import annotations

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
