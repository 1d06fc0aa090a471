"""How a stream counts its times, and one clock for all its packets: `PacketTiming`, `PacketClock`
and `ArrivalClock`.

One damaged byte must not turn ten seconds of video into hours of repeated frames, and a pause of
hours must stay one. Knows no decoder.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from typing import Any

from protokv.video.losses import FrameLosses

# Gaps above the first number are believed unless the next packets contradict them; gaps above the
# second one only if later packets, or the end of the source, confirm them.
_SHORT_GAP_S = 5.0
LONGEST_GAP_S = 600.0

# A source that declares no end was joined of two recordings where a gap is longer than this.
LONGEST_PAUSE_S = 12 * 3600.0

# A key frame whose stamp runs back by more than this begins a new count. Packets come in the order
# of decoding, so other stamps run back by up to the second number.
_BACK_S = 0.25
_REORDER_S = 1.0

# Packets after a leap are read ahead until they are this many seconds away from it, or until they
# are too many, or have too many bytes. The last two numbers are the fewest packets: after a key
# frame, and after another packet, which may be reordered.
_CONFIRM_S = 10.0
_CONFIRM_PACKETS = 600
_CONFIRM_BYTES = 64 << 20
_LEAST_PACKETS = 2
_LEAST_REORDERED = 8

# Counters of MPEG-TS that begin anew are a join, unless the next frame is late by more than this
# many lengths of a frame: then a part is missing.
_MISSING_STEPS = 0.75

# Counters may go on by chance where a part of MPEG-TS is missing. After so many frames of one
# length a gap before a key frame is no pause, unless it is longer than segments are, in seconds.
_EVEN_FRAMES = 25
_EVEN_S = 1e-4
_LONGEST_SEGMENT_S = 60.0

# FFmpeg marks one of the last packets before a join as corrupt, since counters of MPEG-TS begin
# anew there. The next key frame is among this many packets after the mark.
_MARKED_BEFORE = 4

# A frame may stay for this long, even beyond the declared end of the file.
_HOLE_S = 2.0

# Frames without useful time stamps are at least this far apart.
_TICK_S = 1e-3


def bound_declared_end(end_s: float) -> float:
    """Return how far an honest file runs that declares this end."""
    return 1.1 * end_s + 10.0


@dataclass(frozen=True)
class PacketTiming:
    """How a stream counts its times; `time_s = (ticks - origin) * time_base`."""

    time_base: Fraction
    origin: int
    interval_s: float = 0.04  # the usual distance of two frames
    duration_s: float | None = None  # stream time of the end that the source states
    # the same, if a header states it apart from the times of the packets
    declared_s: float | None = None
    confirmed_s: float = 0.0  # the latest end that a header states
    carried_s: float = math.inf  # the longest time that a file of these bytes can have
    longest_pause_s: float = LONGEST_PAUSE_S  # a longer one is damage, or a join
    cuts: bool = False  # parts may be missing without a mark, as in MPEG-TS
    has_pts: bool = True  # the container has presentation times
    # without them: ticks from the decoding time of a packet to that of its frame
    delay: int = 0

    def time_s(self, ticks: int) -> float:
        """Return the stream time of a tick."""
        return float((ticks - self.origin) * self.time_base)

    def ticks(self, time_s: float) -> int:
        """Return the tick at a stream time."""
        return self.origin + int(Fraction(time_s) / self.time_base)

    def seconds(self, ticks: int) -> float:
        """Return a length of time in seconds."""
        return float(ticks * self.time_base)

    def length(self, seconds: float) -> int:
        """Return a length of time in ticks, at least one."""
        return max(1, round(seconds / float(self.time_base)))

    def stamp(self, one: Any) -> int | None:
        """Return the presentation ticks of a frame or a packet, or those of its decoding; None if
        it has none.
        """
        ticks: int | None = one.pts if self.has_pts and one.pts is not None else one.dts
        return ticks

    def latest_s(self, packet: Any) -> float:
        """Return the latest stream time at which the frame of a packet may be shown; infinity if it
        has no stamp.
        """
        ticks = self.stamp(packet)
        return math.inf if ticks is None else self.time_s(ticks + self.delay)

    def stays_s(self, time_s: float, one: Any) -> float | None:
        """Return how long a frame stays, by itself or its packet; None: not said, or impossible."""
        stated_s = float((one.duration or 0) * self.time_base)
        declared = self.declared_s is not None and time_s + stated_s <= self.declared_s + _HOLE_S
        return stated_s if stated_s > 0 and (stated_s <= _HOLE_S or declared) else None


class PacketClock:
    """Moves the time stamps of packets so that they run on where they leap.

    Stamps that leap and come back are damage: only the leaping packets are moved, to follow the
    one before them. Stamps that leap back and stay are a join: an encoder began anew, or
    recordings were put together. Stamps that leap ahead and stay are a pause, if that is
    credible. `account` notes damage and joins, and no pauses.
    """

    def __init__(self, timing: PacketTiming, account: FrameLosses, *, from_origin: bool) -> None:
        """Begin before the first packet, or with `from_origin` False after a seek."""
        self._timing = timing
        self._account = account
        self._last = timing.origin if from_origin else None
        self._stream: Any = None  # of the packets so far
        self._longest_s = 0.0  # the longest pause so far
        self._joined = 0  # ticks that all joins so far add
        self._moved = 0  # ticks that are added to stamps now: those of joins, and of damage
        # The time of decoding of the last packet, how much later than the one before it that was,
        # and how many in a row were so.
        self._decoded: int | None = None
        self._even_step = 0
        self._even = 0
        self._told = -1  # the stamp of a key frame before which a gap is noted
        # stamps of packets that are marked as corrupt only because a join follows
        self.excused: set[int] = set()
        end_s = timing.declared_s
        self._limit_s = timing.carried_s if end_s is None else bound_declared_end(end_s)

    def settle(self, packets: Iterator[Any]) -> Iterator[Any]:
        """Give packets with the stamps that they should have, and None before one that begins a new
        count.
        """
        waiting: deque[Any] = deque()
        while (packet := waiting.popleft() if waiting else next(packets, None)) is not None:
            if (mark := _mark(packet)) is not None:
                last = mark if self._last is None else self._last
                plain_s = self._timing.seconds(mark + self._joined - last)
                ahead_s = self._timing.seconds(mark + self._moved - last)
                if -_REORDER_S <= plain_s <= LONGEST_GAP_S and abs(plain_s) < abs(ahead_s):
                    # The damage is over: stamps go on as before it.
                    self._moved = self._joined
                    ahead_s = plain_s
                back = ahead_s < -_BACK_S and packet.is_keyframe
                late = self._moved == self._joined and self._is_late(mark)
                other = self._stream is not None and packet.stream is not self._stream
                self._stream = packet.stream
                if ahead_s > _SHORT_GAP_S or back or late or other:
                    self._read_ahead(packets, waiting, packet, ahead_s)
                    if self._settle_leap(packet, mark, last, list(map(_mark, waiting)), other):
                        yield None
                if other:
                    self._decoded = None
                if self._timing.cuts and packet.dts is not None:
                    self._note_cut(packet, mark + self._moved)
                mark += self._moved
                self._last = max(last, mark)
                if packet.is_corrupt:
                    waiting.extend(islice(packets, max(0, _MARKED_BEFORE - len(waiting))))
                    self._excuse(packet, mark, list(islice(waiting, _MARKED_BEFORE)))
            if self._moved:
                packet.pts = None if packet.pts is None else packet.pts + self._moved
                packet.dts = None if packet.dts is None else packet.dts + self._moved
            yield packet

    def _note_cut(self, packet: Any, mark: int) -> None:
        """Note what is missing before a key frame of a stream whose frames have one length."""
        seconds = self._timing.seconds
        step = 0 if self._decoded is None else packet.dts - self._decoded
        self._decoded = packet.dts
        if abs(seconds(step - self._even_step)) <= _EVEN_S:
            self._even += 1
            return
        gap_s = seconds(step - self._even_step)
        if (
            packet.is_keyframe
            and self._even >= _EVEN_FRAMES
            and seconds(self._even_step) < gap_s <= _LONGEST_SEGMENT_S
        ):
            if self._told != mark:
                self._account.note_missing(self._timing.time_s(mark) - gap_s, gap_s)
            return
        self._even_step = step
        self._even = 0

    def _is_late(self, mark: int) -> bool:
        return self._timing.time_s(mark) > self._limit_s

    def _step(self, packet: Any) -> int:
        return int(packet.duration or self._timing.length(self._timing.interval_s))

    def _excuse(self, packet: Any, mark: int, following: list[Any]) -> None:
        """Excuse a packet whose mark as corrupt means a join or a gap after it, not bad bytes.

        FFmpeg sets the mark because the counters of MPEG-TS do not go on. Where its bytes are bad,
        the decoder says so. A missing part is noted in the account.
        """
        key = next((n for n, one in enumerate(following) if one.is_keyframe), None)
        if key is None or (found := _mark(following[key])) is None:
            return
        before = [one + self._moved for one in map(_mark, following[:key]) if one is not None]
        last = max(mark, self._last or mark, *before)
        ahead_s = self._timing.seconds(found + self._moved - last)
        leaps = not -_BACK_S <= ahead_s <= LONGEST_GAP_S
        step = self._step(packet)
        step_s = self._timing.seconds(step)
        stamps = [one.dts for one in following[key : key + 2] if one.dts is not None]
        # The mark may be early: bytes may be missing after the key frame.
        torn = self._timing.seconds(stamps[-1] - stamps[0]) > 2 * step_s if stamps else False
        if leaps:
            self.excused.add(mark)
        elif key <= 1 and not torn:
            self.excused.add(mark)
            self._told = found + self._moved
            time_s = self._timing.time_s(last + step)
            if ahead_s - step_s > _MISSING_STEPS * step_s:
                self._account.note_missing(time_s, ahead_s - step_s)
            else:
                self._account.note_join(time_s)

    def _settle_leap(
        self, packet: Any, mark: int, last: int, later: list[int | None], other: bool
    ) -> bool:
        """Decide what a leap from `last` is, and set the shift; return True if a new count begins.

        `later` has the stamps of the packets that follow. With `other`, another recording begins.
        """
        timing = self._timing
        at = mark + self._joined
        gap_s = timing.seconds(at - last)
        step = self._step(packet)
        stays = other or _stays(
            at, last, step, [one + self._joined for one in later if one is not None]
        )
        late = self._is_late(mark)
        if at > last and not late:
            # The next slide may stay twice as long as the longest one until now.
            confirmed = gap_s <= 2 * self._longest_s
            confirmed = confirmed or timing.time_s(at) <= timing.confirmed_s + _HOLE_S
            ends = len(later) < _LEAST_REORDERED and not packet.is_keyframe
            longest_s = math.inf if timing.declared_s is not None else timing.longest_pause_s
            credible = stays and gap_s <= longest_s
            unknown = stays is None or ends
            if credible or (unknown and (confirmed or gap_s <= LONGEST_GAP_S)):
                self._moved = self._joined
                if other:
                    self._account.note_join(timing.time_s(at))
                else:
                    self._longest_s = max(self._longest_s, gap_s)
                return other
        if timing.time_s(last + step) > self._limit_s:
            # Long frames of a damaged file must not add up to hours.
            step = timing.length(_TICK_S)
        # The earliest of the reordered packets comes right after the last one.
        run = [one for one in later[:_LEAST_REORDERED] if one is not None]
        run = [one for one in run if abs(timing.seconds(one - mark)) <= _REORDER_S]
        self._moved = last + step - min(mark, *run) if run else last + step - mark
        time_s = timing.time_s(last + step)
        if stays and not late:
            self._joined = self._moved
            self._account.note_join(time_s)
            return other or bool(packet.is_keyframe)
        self._account.note_damage(time_s, f"time stamps jump to {timing.time_s(at):.0f} s")
        return False

    def _read_ahead(
        self, packets: Iterator[Any], waiting: deque[Any], packet: Any, ahead_s: float
    ) -> None:
        """Read packets ahead until their stamps decide what the leap of `packet` is."""
        least = _LEAST_PACKETS if packet.is_keyframe else _LEAST_REORDERED
        near_s = _CONFIRM_S if ahead_s > LONGEST_GAP_S else -1.0
        size = sum(one.size for one in waiting)
        while len(waiting) < _CONFIRM_PACKETS and size < _CONFIRM_BYTES:
            latest = _mark(waiting[-1]) if waiting else None
            far = latest is not None and abs(latest - _mark(packet)) * self._timing.time_base
            if len(waiting) >= least and latest is not None and far > near_s:
                return
            if (one := next(packets, None)) is None:
                return
            waiting.append(one)
            size += one.size


def _mark(packet: Any) -> Any:
    """Return the stamp by which packets are compared: of presentation, else of decoding."""
    return packet.dts if packet.pts is None else packet.pts


def _stays(at: int, last: int, step: int, later: list[int]) -> bool | None:
    """Return True if the stamps after a leap from `last` go on at `at`, False if they go back to
    where they were, None if there are none.
    """
    stays = None
    for mark in later if at > last else later[:_LEAST_REORDERED]:
        stays = 0 <= mark - at <= 2 * step or abs(mark - at) <= abs(mark - last)
        if stays:
            step = max(step, mark - at)
            at = max(at, mark)
        else:
            last = max(last, mark)
    return stays


class ArrivalClock:
    """Times of the frames of one live connection, from 0 on and strictly increasing.

    Cameras begin with a frame without a time stamp, jump back to 0, and drift; networks deliver in
    bursts. A frame has its own time stamp plus `later_s` while that agrees with its arrival within
    `slack_s`; otherwise it has the time of its arrival. `clock` gives seconds that only go forward.
    """

    def __init__(self, slack_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._slack_s = slack_s
        self._clock = clock
        self.later_s = 0.0
        self._began_s: float | None = None
        self._last_s = -_TICK_S
        self._last_own_s: float | None = None
        self._agreed = False  # `later_s` was found for this count of the camera

    def begin_anew(self) -> None:
        """Let the next frame begin a new count."""
        self._agreed = False
        self._last_own_s = None

    def settle(self, packets: Iterator[Any]) -> Iterator[Any]:
        """Give packets, and None before a key frame whose count begins anew."""
        last: int | None = None
        for packet in packets:
            mark = packet.pts if packet.dts is None else packet.dts
            if (
                mark is not None
                and last is not None
                and (last - mark) * packet.time_base > _REORDER_S
            ):
                self.begin_anew()
                if packet.is_keyframe:
                    yield None
            last = last if mark is None else mark
            yield packet

    def __call__(self, own_s: float | None) -> float | None:
        """Return the time of the frame that has just arrived; None if a newer one came before it.

        `own_s` is its time stamp; None if it has none. Decoders give frames out of order where
        packets are lost.
        """
        now_s = self._clock()
        self._began_s = now_s if self._began_s is None else self._began_s
        arrived_s = now_s - self._began_s
        if own_s is not None and self._last_own_s is not None and own_s <= self._last_own_s:
            return None
        time_s = own_s + self.later_s if own_s is not None and self._agreed else -1.0
        if time_s <= self._last_s or abs(time_s - arrived_s) > self._slack_s:
            time_s = max(arrived_s, self._last_s + _TICK_S)
            self._agreed = own_s is not None
            self.later_s = self.later_s if own_s is None else time_s - own_s
        self._last_s = time_s
        self._last_own_s = own_s
        return time_s
