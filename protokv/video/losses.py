"""`FrameLosses`: the account of what a reading of a video could not give."""

from __future__ import annotations

import math

from protokv.texts import format_count
from protokv.video.source import SourceDamage


class FrameLosses:
    """The account of one reading from `start_s` on: which frames went into a decoder, came back,
    and are lost.

    Decoders give frames in order of presentation. A frame that is older than one that came back
    will never come, so only awaited frames are kept and memory does not grow with the video.
    """

    def __init__(self) -> None:
        self.start_s = 0.0  # where the reading begins
        self.interval_s = 0.04  # the usual distance of two frames
        self.notes: list[str] = []  # notes for the user that are no damage
        # a decoder met damage, counted or not; frames that are missing at the end do not matter
        self.met = False
        # each packet gives one frame, so missing frames count; otherwise failed packets count
        self.matching = True
        self._last_s = -math.inf
        self._awaited = set[float]()
        self._lost = self._damaged = 0
        self._from_s = math.inf
        self._why = ""

    def expect(self, time_s: float) -> None:
        """Note that a frame of this time went into a decoder."""
        if self.matching and time_s >= self.start_s and time_s != self._last_s:
            self._awaited.add(time_s)
            self._give_up(self._last_s)

    def take(self, time_s: float) -> bool:
        """Note that a frame came back. Return False if it is not newer than the one before: leave
        it out.
        """
        if time_s <= self._last_s:
            return False
        self._last_s = time_s
        self._awaited.discard(time_s)
        self._give_up(time_s)
        return True

    def finish(self) -> None:
        """Count every frame that is still awaited as lost: the decoder has given all it had."""
        self._give_up(math.inf)

    def _give_up(self, time_s: float) -> None:
        late = {one for one in self._awaited if one < time_s} if self.matching else set()
        self._awaited -= late
        if late:
            self.met = True
            self.add(min(late), lost=len(late))

    def note_damage(self, time_s: float, why: str) -> None:
        """Count a frame that is given although its picture or its time stamp is damaged."""
        self.met = True
        self.add(time_s, why, damaged=1)

    def note_missing(self, time_s: float, gap_s: float) -> None:
        """Count the frames of a part that is missing."""
        lost = max(1, round(gap_s / self.interval_s))
        self.add(time_s, f"{gap_s:.3g} s are missing", lost=lost)

    def note_join(self, time_s: float) -> None:
        """Note that another recording is joined on here, which is no damage."""
        self.notes.append(f"at {time_s:.2f} s another recording is joined on: times go on")

    def note_failure(self, time_s: float | None, why: str) -> None:
        """Note that a decoder refused the packet of this time, or a demultiplexer failed."""
        self.met = True
        if time_s is None:
            self.add(max(self._last_s, self.start_s), why, lost=1)
        elif self.matching:
            # The frame that does not come will count.
            self.add(math.inf, why)
        else:
            self.add(time_s, why, lost=1)

    def add(self, time_s: float, why: str = "", *, lost: int = 0, damaged: int = 0) -> None:
        """Count frames, the first of them at this time, unless the reading begins after it."""
        if time_s >= self.start_s:
            self._lost += lost
            self._damaged += damaged
            self._why = self._why or why
            self._from_s = min(self._from_s, time_s)

    @property
    def damage(self) -> SourceDamage:
        """The account so far."""
        counted = ((self._lost, "could not be decoded"), (self._damaged, "came damaged"))
        parts = [f"{format_count(n, 'frame')} {what}" for n, what in counted if n]
        if not parts:
            return SourceDamage()
        message = f"{' and '.join(parts)}, first at {self._from_s:.2f} s"
        message += f" ({self._why})" if self._why else ""
        return SourceDamage(self._lost, self._damaged, self._from_s, message)
