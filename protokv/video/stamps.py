"""Credible times of frames: `Stamps` for streams; `Timeline` and `FileClock` for files.

One damaged byte must not turn ten seconds of video into hours of repeated frames. Times are seconds. Knows no decoder.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

# Reordering explains fewer frames in a row that are older than the last one; this many begin a new count.
MOST_LATE = 8

# The least distance of two frames of a stream whose time stamps say nothing.
TICK_S = 1e-3

# A longer gap in the stamps of a stream with a clock of its own begins a new count.
LONGEST_HOLE_S = 600.0

# A frame may say that it stays for this long, even after the end that the file declares.
HOLE_S = 2.0

# The longest gap between two frames of a file that declares its end, and of one that does not.
LONGEST_GAP_S, LONGEST_GAP_WITHOUT_END_S = 3600.0, 600.0

# How far an honest file may run beyond the end that it declares.
BEYOND_END_S, BEYOND_END_PART = 10.0, 0.1


class Stamps:
    """Times of the frames of one connection, from 0 on and strictly increasing.

    Cameras begin with a frame without a time stamp, jump back to 0, and drift; networks deliver in bursts. The frames
    of a live stream keep their own spacing while it agrees with their arrival within `slack_s`; else the arrival
    counts. A pipe has a clock of its own (`slack_s` is infinite): only a stamp that is missing, runs
    back or leaps begins a new count.
    """

    def __init__(
        self, slack_s: float, interval_s: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin before the first frame.

        Args:
            slack_s: how far the time of a frame may be from its arrival.
            interval_s: the distance of two frames, as the stream says.
            clock: seconds that only go forward.
        """
        self._slack_s, self._interval_s, self._clock = slack_s, interval_s or TICK_S, clock
        self._began_s: float | None = None
        self._last_s = -math.inf
        self._last_own_s: float | None = None
        self._offset_s: float | None = None  # stream time of a frame whose own time is 0
        self._late = 0

    def begin_anew(self) -> None:
        """Let the next frame begin a new count."""
        self._offset_s = self._last_own_s = None

    def __call__(self, own_s: float | None) -> float | None:
        """Return the time of the frame that has just arrived; None if a newer one came before it.

        Decoders give frames out of order where packets are lost.

        Args:
            own_s: the time stamp of the frame; None if it has none.
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


@dataclass(frozen=True)
class Timeline:
    """The credible times of a file. `end_s` is the end that it declares apart from its frames' times, or None."""

    end_s: float | None = None

    @property
    def limit_s(self) -> float:
        """No frame can be shown later than this."""
        return math.inf if self.end_s is None else self.end_s * (1 + BEYOND_END_PART) + BEYOND_END_S

    def leaps(self, before_s: float, time_s: float) -> bool:
        """Return True if a frame at `time_s` cannot follow one at `before_s` (0 for the first frame)."""
        longest_s = LONGEST_GAP_WITHOUT_END_S if self.end_s is None else LONGEST_GAP_S
        return time_s > self.limit_s or time_s - before_s > longest_s

    def duration_s(self, time_s: float, stated_s: float | None) -> float | None:
        """Return how long the frame at `time_s` stays; None if it does not say, or says something impossible."""
        if stated_s is None or stated_s <= 0:
            return None
        declared = self.end_s is not None and time_s + stated_s <= self.end_s + HOLE_S
        return stated_s if stated_s <= HOLE_S or declared else None


class FileClock:
    """Times of the frames of one reading of a file, in order of presentation.

    A stamp that leaps begins a new count: its frame follows the one before it. Recordings in MPEG-TS leap where they
    were joined, where an encoder restarted and at an `EXT-X-DISCONTINUITY` of HLS. Where the stamps go back to the
    first count, that one goes on, so frames with a damaged stamp move no others.
    """

    def __init__(self, timeline: Timeline, begin_s: float = 0.0) -> None:
        self._timeline, self._last_s, self._shift_s = timeline, begin_s, 0.0

    def place(self, stamped_s: float, step_s: float) -> tuple[float, bool]:
        """Return the time of the next frame, and whether its stamp leaps.

        Args:
            stamped_s: the time stamp of the frame.
            step_s: the usual distance of two frames.
        """
        for shift_s in (self._shift_s, 0.0):
            time_s = stamped_s + shift_s
            if time_s >= self._last_s and not self._timeline.leaps(self._last_s, time_s):
                self._last_s, self._shift_s = time_s, shift_s
                return time_s, False
        if stamped_s + self._shift_s < self._last_s:
            return stamped_s + self._shift_s, False  # out of order: the report leaves it out
        self._last_s += step_s
        self._shift_s = self._last_s - stamped_s
        return self._last_s, True
