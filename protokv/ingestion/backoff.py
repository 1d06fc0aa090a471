"""How long to wait before the next attempt: twice as long each time, up to a limit, and never quite the same.

Full jitter over the upper half, so that many readers of one camera do not come back in step (Brooker, "Exponential
Backoff And Jitter", https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/).
"""

from __future__ import annotations

import random
from collections.abc import Callable


class Backoff:
    """Pauses in seconds."""

    def __init__(self, first_s: float, longest_s: float, draw: Callable[[], float] = random.random) -> None:
        """The next pause is the first one."""
        self._first_s, self._longest_s, self._draw = first_s, longest_s, draw
        self._next_s = first_s

    def reset(self) -> None:
        """It went well: the next pause is the first one again."""
        self._next_s = self._first_s

    def next_s(self) -> float:
        """How long to wait now."""
        pause_s = self._next_s
        self._next_s = min(2 * pause_s, self._longest_s)
        return pause_s * (0.5 + 0.5 * self._draw())
