"""The account of one reading: which frames were sent to a decoder, which came back, which are lost.

Decoders give frames in presentation order, so a frame that was sent and is older than one that came back
will never come. Only what is still awaited is held: memory does not grow with the video.
Knows nothing of files or decoders. Times are seconds.
"""

from __future__ import annotations

from protokv.video.source import Damage


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
