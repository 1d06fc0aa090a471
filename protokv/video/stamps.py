"""When the frames of a stream appear: by their own time stamps as far as these can be believed, else by their arrival.

Cameras begin with a frame without a time stamp, jump back to 0, and drift; networks deliver in bursts. A stream on the
clock of the wall keeps its own spacing while that agrees with the arrival of its frames within `slack_s`, and is set to
the arrival where it does not. A stream with a clock of its own (`slack_s` infinite: a pipe, a growing file) is set
anew only where its time stamps are missing, run back or leap. Times are seconds since the first frame and increase
strictly. Knows no decoder.

Which time stamps of a file are credible: one flipped byte must not turn ten seconds into hours of repeated frames.

A frame that appears much later than the file can mean is damage: it is left out and counted. Knows no decoder.
Times are seconds of the stream.

The account of one reading: which frames were sent to a decoder, which came back, which are lost.

Decoders give frames in presentation order, so a frame that was sent and is older than one that came back
will never come. Only what is still awaited is held: memory does not grow with the video.
Knows nothing of files or decoders. Times are seconds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from protokv.video.source import Damage

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


# A gap up to this, and a last frame that stays so long, need nothing else that speaks for them.
HOLE_S = 2.0

# No two frames of a file are further apart than this, whatever it declares.
LONGEST_GAP_S = 3600.0

# The same where the file declares no end that could be held against it.
LONGEST_GAP_WITHOUT_END_S = 600.0

# How far an honest file may run beyond the end that it declares.
BEYOND_END_S, BEYOND_END_PART = 10.0, 0.1


@dataclass(frozen=True)
class Timeline:
    """What may be believed: `end_s` is the declared end, None where none is declared apart from the frames' times."""

    end_s: float | None = None

    @property
    def limit_s(self) -> float:
        """No frame can be shown later than this."""
        return float("inf") if self.end_s is None else self.end_s * (1 + BEYOND_END_PART) + BEYOND_END_S

    def leaps(self, before_s: float, time_s: float) -> bool:
        """Whether a frame at `time_s` cannot follow one at `before_s` (0 for the first)."""
        longest_s = LONGEST_GAP_WITHOUT_END_S if self.end_s is None else LONGEST_GAP_S
        return time_s > self.limit_s or time_s - before_s > longest_s

    def duration_s(self, time_s: float, stated_s: float | None) -> float | None:
        """How long the frame at `time_s` stays; None where it does not say, or says what cannot be."""
        if stated_s is None or stated_s <= 0:
            return None
        declared = self.end_s is not None and time_s + stated_s <= self.end_s + HOLE_S
        return stated_s if stated_s <= HOLE_S or declared else None


class DecodeReport:
    """Counts losses at or after `start_s`. One report a reading."""

    def __init__(self, start_s: float = 0.0) -> None:
        self.start_s = start_s
        self.last_s: float | None = None
        self.match = True
        self.met = False  # damage that a decoder met, counted or not; what a file lacks at its end is none
        self._awaited: set[float] = set()
        self._lost = 0
        self._damaged = 0
        self._from_s: float | None = None
        self._why: list[str] = []

    def sent(self, time_s: float) -> None:
        """A frame of this time went into a decoder."""
        if not self.match or time_s < self.start_s:
            return
        if self.last_s is None or time_s > self.last_s:
            self._awaited.add(time_s)
        elif time_s < self.last_s:
            # A later one was given already (a damaged stream, or times that jump back): too late for this one.
            self._settle([time_s])

    @property
    def awaited(self) -> frozenset[float]:
        """Times of the frames that were sent and have not come back."""
        return frozenset(self._awaited)

    def shown(self, time_s: float, sent_s: float | None = None, *, corrupt: bool = False) -> bool:
        """A frame came back. False where it is not newer than the one before: it must not be given on.

        `sent_s` is the time under which it was sent, where that was another.
        """
        if self.last_s is not None and time_s <= self.last_s:
            return False
        self.last_s = time_s
        self._awaited.discard(time_s if sent_s is None else sent_s)
        self._settle([t for t in self._awaited if t < time_s])
        self.met |= corrupt
        if corrupt and time_s >= self.start_s:
            self._damaged += 1
            self._note(time_s, "a frame is marked as corrupt")
        return True

    def stop_matching(self) -> None:
        """Packets and frames are not one to one in this stream: from here on count reported failures only."""
        self.match = False
        self._awaited.clear()

    def failed(self, time_s: float | None, why: str) -> None:
        """A decoder refused a packet. Where frames are matched, the frame that stays away is what counts."""
        self.met = True
        self._note(time_s, why)
        if not self.match or time_s is None:
            self._lost += 1
            self._mark(time_s if time_s is not None else self.last_s)

    def moved(self, time_s: float, why: str) -> None:
        """A frame of `time_s` has a time stamp that cannot be true."""
        self.met = True
        if time_s >= self.start_s:
            self._damaged += 1
            self._mark(time_s)
        self._note(time_s, why)

    def leapt(self, before_s: float, time_s: float) -> None:
        """A frame came whose time cannot be true: it is left out, and lost at the time of the one before it."""
        self.met = True
        self._awaited.discard(time_s)
        if before_s >= self.start_s:
            self._lost += 1
            self._mark(before_s)
        self._note(before_s, f"time stamps jump to {time_s:.0f} s")

    def missing(self, frames: int, from_s: float, why: str) -> None:
        """The file promises `frames` more from `from_s` on."""
        if frames > 0:
            self._lost += frames
            self._mark(from_s)
            self._note(from_s, why)

    def finish(self) -> None:
        """The decoder has given all it had: what is still awaited is lost."""
        self._settle(list(self._awaited))

    @property
    def damage(self) -> Damage:
        """The account so far."""
        if not self._lost and not self._damaged:
            return Damage()
        from_s = self._from_s if self._from_s is not None else 0.0
        parts = []
        if self._lost:
            parts.append(f"{self._lost} {'frame' if self._lost == 1 else 'frames'} could not be decoded")
        if self._damaged:
            parts.append(f"{self._damaged} {'frame is' if self._damaged == 1 else 'frames are'} damaged")
        why = f" ({self._why[0]})" if self._why else ""
        return Damage(self._lost, self._damaged, from_s, f"{' and '.join(parts)}, first at {from_s:.2f} s{why}")

    def _settle(self, times: list[float]) -> None:
        if times:
            self.met = True
            self._awaited.difference_update(times)
            self._lost += len(times)
            self._mark(min(times))

    def _mark(self, time_s: float | None) -> None:
        if time_s is not None and (self._from_s is None or time_s < self._from_s):
            self._from_s = time_s

    def _note(self, time_s: float | None, why: str) -> None:
        if time_s is None or time_s >= self.start_s:
            if not self._why:
                self._why.append(why)
            if why == "a frame is marked as corrupt":
                self._mark(time_s)
