"""When the frames of a stream appear: by their own time stamps as far as these can be believed, else by their arrival.

Cameras begin with a frame without a time stamp, jump back to 0, and drift; networks deliver in bursts. A stream on the
clock of the wall keeps its own spacing while that agrees with the arrival of its frames within `slack_s`, and is set to
the arrival where it does not. A stream with a clock of its own (`slack_s` infinite: a pipe, a growing file) is set
anew only where its time stamps are missing, run back or leap. Times are seconds since the first frame and increase
strictly. Knows no decoder.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

# Frames in a row that are older than what was given: so many come of no reordering, so a new count has begun.
MOST_LATE = 8

# The least that lies between two frames of a stream whose time stamps say nothing.
TICK_S = 1e-3

# A stream with a clock of its own may have a hole of this length; what leaps further has begun a new count.
LONGEST_HOLE_S = 600.0


class Stamps:
    """The times of one connection's frames, in the order in which they arrive."""

    def __init__(
        self, slack_s: float, interval_s: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Nothing has arrived yet.

        Args:
            slack_s: how far a frame's own time may be from its arrival; infinite where the stream has its own clock.
            interval_s: what lies between two frames, as the stream says.
            clock: seconds that only go forward.
        """
        self._slack_s = slack_s
        self._interval_s = interval_s or TICK_S
        self._clock = clock
        self._began_s: float | None = None
        self._last_s = -math.inf
        self._last_own_s: float | None = None
        self._offset_s: float | None = None  # stream time of the frame whose own time is 0
        self._late = 0

    def begin_anew(self) -> None:
        """The stream counts its time stamps anew from the next frame on."""
        self._offset_s = self._last_own_s = None

    def __call__(self, own_s: float | None) -> float | None:
        """The time of the frame that has just arrived; None where one as new or newer was given before it.

        Where packets are lost, decoders give frames out of order.

        Args:
            own_s: its own time stamp, None where it has none.
        """
        now_s = self._clock()
        if self._began_s is None:
            self._began_s = now_s
        arrived_s = now_s - self._began_s
        late = own_s is not None and self._last_own_s is not None and own_s <= self._last_own_s
        self._late = self._late + 1 if late else 0
        if late and self._late < MOST_LATE:
            return None
        if own_s is None or not self._believed(own_s, arrived_s):
            anew_s = arrived_s if math.isfinite(self._slack_s) else self._last_s + self._interval_s
            time_s = max(anew_s, self._last_s + TICK_S, 0.0)
            self._offset_s = None if own_s is None else time_s - own_s
        else:
            assert self._offset_s is not None
            time_s = own_s + self._offset_s
        self._last_s, self._last_own_s = time_s, own_s
        return time_s

    def _believed(self, own_s: float, arrived_s: float) -> bool:
        if self._offset_s is None or self._last_own_s is None or own_s <= self._last_own_s:
            return False
        time_s = own_s + self._offset_s
        if time_s <= self._last_s:
            return False
        if math.isfinite(self._slack_s):
            return abs(time_s - arrived_s) <= self._slack_s
        return own_s - self._last_own_s <= LONGEST_HOLE_S
