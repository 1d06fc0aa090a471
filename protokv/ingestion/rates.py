"""`Rates`: finds out that the model is slower than a live source. Knows no frames."""

from __future__ import annotations

from collections.abc import Callable

from protokv.ingestion.events import Slow

# Frames dropped before the two rates are told: enough to be no hiccup.
MANY = 8


class Rates:
    """How fast frames come and how fast they are watched, since the connection; told once."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Nothing has come."""
        self._clock, self._told = clock, False
        self.reset(0)

    def reset(self, dropped: int) -> None:
        """A connection begins, when so many frames were dropped in all."""
        self._since_s, self._taken, self._dropped = self._clock(), 0, dropped

    def took(self, dropped: int) -> Slow | None:
        """Another frame is watched, and so many were dropped in all."""
        self._taken += 1
        lost, passed_s = dropped - self._dropped, self._clock() - self._since_s
        if self._told or lost < MANY or passed_s <= 0:
            return None
        self._told = True
        return Slow((self._taken + lost) / passed_s, self._taken / passed_s)
