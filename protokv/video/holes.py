"""Whether a hole between two time stamps is one of the recording or a damaged stamp: what follows tells.

A frame that comes much later than the one before it is believed once the following packets go on from there. If they
go back to the old clock, the stamp was damaged, and the frame is placed by its order. Where too little follows, at the
end or after a first few frames, and no declared end speaks for it, the hole is closed. Packets are looked at before
they are decoded, a bounded number of bytes ahead. Times are seconds of the stream. Knows no decoder.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from protokv.video.stamps import HOLE_S, Timeline

# A hole is believed when the stream goes on for so long behind it: Matroska has one time for up to 5 s of frames.
CONFIRM_S = 10.0

# How far is looked ahead, whatever the time stamps say.
AHEAD_BYTES, AHEAD_PACKETS = 64 << 20, 4096

# So many frames make a clock; fewer before a hole may have been stamped wrongly themselves.
CLOCK_FRAMES = 8

# So many frames before a hole may never come, and it is one all the same.
MOST_LOST = 1

# So many packets that go back at the beginning show where; frames are not reordered over more.
MOST_BACK = 32

# Holes of which none is longer than the others by more are those of slow pictures.
ALIKE = 4


class PacketLookahead:
    """Packets, in order, and the times of those that come next."""

    def __init__(self, packets: Iterable[Any], time_of: Callable[[Any], float | None]) -> None:
        self._packets, self._time_of = iter(packets), time_of
        self._held: deque[tuple[Any, float | None]] = deque()
        self._bytes = 0

    def __iter__(self) -> Iterator[Any]:
        while self._held or self._pull():
            packet, _ = self._held.popleft()
            self._bytes -= packet.size
            yield packet

    def times(self) -> Iterator[float]:
        """Of what follows, in order of decoding, to the end or to the limit: then an infinite one comes last."""
        number = 0
        while number < len(self._held) or self._pull():
            time_s = self._held[number][1]
            if time_s is not None:
                yield time_s
            number += 1
            if number >= AHEAD_PACKETS or self._bytes > AHEAD_BYTES:
                yield math.inf
                return

    def _pull(self) -> bool:
        packet = next(self._packets, None)
        if packet is not None:
            self._held.append((packet, self._time_of(packet)))
            self._bytes += packet.size
        return packet is not None


def beginning_s(first_s: float, following: Iterable[float], step_s: float) -> float:
    """When a stream begins whose first frame is stamped `first_s`, as one cluster of Matroska may be, far ahead.

    Where what follows goes back, it begins so long before that as the frames of the first clock last. One packet that
    goes back is one that is damaged itself, and where the first clock runs on, it is right.

    Args:
        first_s: what the first frame is stamped.
        following: the times of packets behind it, in order of decoding.
        step_s: what lies between two frames.
    """
    back, last_s = [], first_s
    for one_s in following:
        if one_s - first_s > CONFIRM_S:
            return first_s
        if one_s >= first_s - HOLE_S:
            last_s = max(last_s, one_s)
        else:
            back.append(one_s)
        if len(back) == MOST_BACK:
            break
    return first_s if len(back) <= MOST_LOST else min(back) - (last_s - first_s) - step_s


class Clock:
    """Gives every frame of one reading a time that can be true, in order of presentation.

    Args:
        timeline: what the file declares.
        ahead: the packets that are decoded.
        begin_s: where reading begins; 0 from the beginning.
        whole: all packets are there, so looking ahead costs no waiting.
    """

    def __init__(self, timeline: Timeline, ahead: PacketLookahead, begin_s: float = 0.0, *, whole: bool = True) -> None:
        self._timeline, self._ahead, self._whole = timeline, ahead, whole
        self._last_s = begin_s
        self._frames = 0
        self._longest_s = HOLE_S / ALIKE
        self._closed_s = 0.0

    def place(
        self, stamped_s: float, step_s: float, awaited: Iterable[float] = (), waited_s: float = 0.0
    ) -> tuple[float, bool]:
        """The time of the next frame, and whether its stamp says another that is damaged.

        Args:
            stamped_s: what its time stamp says.
            step_s: what lies between two frames.
            awaited: times of packets that were decoded, whose frames have not come yet.
            waited_s: what passed by another clock, of a stream that comes as it is made; it needs no other witness.
        """
        time_s = stamped_s - self._closed_s
        placed_s = time_s
        if time_s - self._last_s > HOLE_S + waited_s:
            placed_s = self._judged(time_s, step_s, [one - self._closed_s for one in awaited])
        if not self._frames and placed_s > 0:
            self._frames = CLOCK_FRAMES  # reading began in the middle
        self._frames += 1
        if placed_s > self._last_s or self._frames == 1:
            self._last_s = placed_s
        return placed_s, placed_s != time_s

    def _judged(self, time_s: float, step_s: float, awaited: list[float]) -> float:
        before_s, hole_s = self._last_s, time_s - self._last_s
        # The first frame of all is where reading begins.
        step_s = step_s if self._frames else 0.0
        back, later_s, longest_s, confirmed = [], time_s, 0.0, False
        for one_s in chain(sorted(awaited), (one - self._closed_s for one in self._ahead.times())):
            if before_s < one_s < time_s:
                back.append(one_s)
            elif later_s < one_s < math.inf:
                longest_s, later_s = max(longest_s, one_s - later_s), one_s
            # Holes confirm no hole, or one damaged field would that stamps several frames.
            goes_on = not self._whole or longest_s <= max(HOLE_S, ALIKE * self._longest_s)
            confirmed = one_s == math.inf or (goes_on and later_s - time_s > CONFIRM_S)
            if confirmed or len(back) > MOST_LOST:
                break
        if back and not confirmed:
            return before_s + min(step_s, (min(back) - before_s) / 2)
        if self._timeline.end_s is not None:
            # What is looked at goes no further than a little beyond a confirmed hole.
            end_s = self._timeline.end_s + HOLE_S
            credible = time_s <= end_s and not end_s < later_s < math.inf
        else:
            # A few frames are no clock. Slow pictures have more such holes, before and behind this one.
            slow = hole_s <= ALIKE * max(self._longest_s, longest_s)
            credible = slow or (confirmed and self._frames >= CLOCK_FRAMES)
        if credible and not self._timeline.leaps(before_s, time_s):
            self._longest_s = max(self._longest_s, hole_s)
            return time_s
        self._closed_s += hole_s - step_s
        return before_s + step_s
