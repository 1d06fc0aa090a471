"""The account of one reading of a file: which frames went into a decoder, which came back, and which are lost.

Decoders give frames in order of presentation. A frame that is older than one that came back will never come, so only
awaited frames are kept and memory does not grow with the video. Times are seconds. Knows no files and no decoders.
"""

from __future__ import annotations

from protokv.video.source import Damage

CORRUPT = "a frame is marked as corrupt"


class DecodeReport:
    """Counts the losses at or after `start_s`. One report a reading.

    Attributes:
        start_s: where the reading begins.
        last_s: time of the last frame that came back.
        met_damage: a decoder met damage, counted or not. Frames missing at the end of a file do not count here.
    """

    def __init__(self, start_s: float = 0.0) -> None:
        self.start_s = start_s
        self.last_s: float | None = None
        self.met_damage = False
        self._matching = True
        self._awaited: set[float] = set()
        self._lost = 0
        self._damaged = 0
        self._from_s: float | None = None
        self._why = ""

    def expect(self, time_s: float) -> None:
        """Note that a frame of this time went into a decoder."""
        if not self._matching or time_s < self.start_s:
            return
        if self.last_s is None or time_s > self.last_s:
            self._awaited.add(time_s)
        elif time_s < self.last_s:
            # A later frame came already (a damaged stream, or times that jump back): this one comes too late.
            self._settle([time_s])

    def take(self, time_s: float, *, corrupt: bool = False) -> bool:
        """Note that a frame came back. Return False if it is not newer than the one before: leave it out."""
        if self.last_s is not None and time_s <= self.last_s:
            return False
        self.last_s = time_s
        self._awaited.discard(time_s)
        self._settle([t for t in self._awaited if t < time_s])
        if corrupt:
            self.note_damage(time_s, CORRUPT)
        return True

    def note_damage(self, time_s: float, why: str) -> None:
        """Count a frame that is given although its picture or its time stamp is damaged."""
        self.met_damage = True
        if time_s >= self.start_s:
            self._damaged += 1
            self._note(time_s, why)

    def stop_matching(self) -> None:
        """Count reported failures only: packets and frames of this stream are not one to one."""
        self._matching = False
        self._awaited.clear()

    def note_failure(self, time_s: float | None, why: str) -> None:
        """Note that a decoder refused a packet. If frames are matched, the missing frame counts, not the packet."""
        self.met_damage = True
        if time_s is None or time_s >= self.start_s:
            self._why = self._why or why
        if not self._matching or time_s is None:
            self._lost += 1
            self._mark(time_s if time_s is not None else self.last_s)

    def note_missing(self, frames: int, from_s: float, why: str) -> None:
        """Count frames that the file promises from `from_s` on and does not hold."""
        self._lost += frames
        self._note(from_s, why)

    def finish(self) -> None:
        """Count every frame that is still awaited as lost: the decoder has given all it had."""
        self._settle(list(self._awaited))

    @property
    def damage(self) -> Damage:
        """The account so far."""
        if not self._lost and not self._damaged:
            return Damage()
        from_s = self._from_s or 0.0
        lost = f"{self._lost} {'frame' if self._lost == 1 else 'frames'} could not be decoded"
        damaged = f"{self._damaged} {'frame is' if self._damaged == 1 else 'frames are'} damaged"
        parts = [text for text, count in ((lost, self._lost), (damaged, self._damaged)) if count]
        why = f" ({self._why})" if self._why else ""
        return Damage(self._lost, self._damaged, from_s, f"{' and '.join(parts)}, first at {from_s:.2f} s{why}")

    def _settle(self, times: list[float]) -> None:
        if times:
            self.met_damage = True
            self._awaited.difference_update(times)
            self._lost += len(times)
            self._mark(min(times))

    def _note(self, time_s: float, why: str) -> None:
        self._mark(time_s)
        self._why = self._why or why

    def _mark(self, time_s: float | None) -> None:
        if time_s is not None and (self._from_s is None or time_s < self._from_s):
            self._from_s = time_s
