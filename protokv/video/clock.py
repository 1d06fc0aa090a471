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

# A longer gap than this is believed unless the next packets deny it; than that, if later ones, or
# the end, confirm it.
_SHORT_GAP_S = 5.0
LONGEST_GAP_S = 600.0

# After a longer gap than this, a source that declares no end is taken for two that were joined.
LONGEST_PAUSE_S = 12 * 3600.0

# Key frames whose time stamps run back by more than this begin a new count; packets as a whole are
# reordered by less.
_BACK_S = 0.25
_REORDER_S = 1.0

# What is read ahead to confirm a leap, at most; and at least, of which a reordered packet needs
# more.
_CONFIRM_S = 10.0
_CONFIRM_PACKETS = 600
_CONFIRM_BYTES = 64 << 20
_LEAST_PACKETS = 2
_LEAST_REORDERED = 8

# A recording that goes on after more than this, behind counters that do not, lacks a part.
_MISSING_S = 0.25

# FFmpeg marks one of so many packets before a join as corrupt: counters of MPEG-TS begin anew
# there.
_MARKED_BEFORE = 4

# A frame may say that it stays for this long, even after the end that the file declares.
_HOLE_S = 2.0

# The least distance of two frames of a stream whose time stamps say nothing.
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
    declared_s: float | None = None  # the same, if it does not come from the times of the packets
    # until when anything else than the packets of the pictures says that the source lasts
    confirmed_s: float = 0.0
    carried_s: float = math.inf  # no stream of so few bytes is longer
    has_pts: bool = True  # the container has presentation times
    # without them: how much later the decoding time of a frame is than that of its packet
    delay: int = 0

    def time_s(self, ticks: int) -> float:
        """Return the stream time of a tick."""
        return float((ticks - self.origin) * self.time_base)

    def ticks(self, time_s: float) -> int:
        """Return the tick at a stream time."""
        return self.origin + int(Fraction(time_s) / self.time_base)

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
        """Return the latest stream time at which the frame of a packet is shown; infinity if
        nothing tells.
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

    Stamps that leap and come back are damaged: their packets follow the one before, and no others
    are moved. Stamps that stay behind are a join, where an encoder restarted or recordings were put
    together. Stamps that stay ahead are a pause, if it is credible.
    """

    def __init__(
        self,
        timing: PacketTiming,
        *,
        from_origin: bool,
        on_join: Callable[[float], None],
        on_damage: Callable[[float, str], None],
        on_missing: Callable[[float, float], None],
    ) -> None:
        """Begin before the first packet, or after a seek. The functions are called with the stream
        time; and with why, or how many seconds are missing.
        """
        self._timing = timing
        self._on_join = on_join
        self._on_damage = on_damage
        self._on_missing = on_missing
        self._last = timing.origin if from_origin else None
        self._longest = 0  # pause so far that was believed
        # ticks that the joins so far added, and that are added to stamps now
        self.shift = self._moved = 0
        # stamps of packets that are marked as corrupt only because a join follows
        self.excused: set[int] = set()
        end_s = timing.declared_s
        ticks = timing.length
        bound_s = timing.carried_s if end_s is None else bound_declared_end(end_s)
        self._limit = math.inf if bound_s == math.inf else timing.ticks(bound_s)
        self._confirmed = timing.ticks(timing.confirmed_s + _HOLE_S)
        self._gap = ticks(LONGEST_GAP_S)
        self._reorder = ticks(_REORDER_S)
        self._back = ticks(_BACK_S)
        self._short = ticks(_SHORT_GAP_S)
        self._pause = ticks(LONGEST_PAUSE_S)

    def settle(self, packets: Iterator[Any]) -> Iterator[Any]:
        """Give packets with the stamps that they should have, and None before one that begins a new
        count.
        """
        waiting: deque[Any] = deque()
        while (packet := waiting.popleft() if waiting else next(packets, None)) is not None:
            if (mark := _mark(packet)) is not None:
                last = mark if self._last is None else self._last
                known = mark + self.shift - last
                if -self._reorder <= known <= self._gap and abs(known) < abs(
                    mark + self._moved - last
                ):
                    # The damaged stamps are over: those of before go on.
                    self._moved = self.shift
                ahead = mark + self._moved - last
                back = ahead < -self._back and packet.is_keyframe
                if (
                    ahead > self._short
                    or back
                    or (mark > self._limit and self._moved == self.shift)
                ):
                    self._read_ahead(packets, waiting, packet, mark, last)
                    if self._settle_leap(packet, mark, last, [_mark(one) for one in waiting]):
                        yield None
                mark += self._moved
                self._last = max(last, mark)
                if packet.is_corrupt:
                    self._excuse(packets, waiting, packet, mark)
            if self._moved:
                packet.pts = None if packet.pts is None else packet.pts + self._moved
                packet.dts = None if packet.dts is None else packet.dts + self._moved
            yield packet

    def _excuse(self, packets: Iterator[Any], waiting: deque[Any], packet: Any, mark: int) -> None:
        """Excuse a packet that is marked as corrupt because another recording follows it, or a gap.

        FFmpeg marks it since the counters of MPEG-TS do not go on. Its own bytes may be whole, and
        the decoder says so if they are not.
        """
        waiting.extend(islice(packets, max(0, _MARKED_BEFORE - len(waiting))))
        key = next((n for n, one in enumerate(waiting) if one.is_keyframe), _MARKED_BEFORE)
        if key >= _MARKED_BEFORE or (found := _mark(waiting[key])) is None:
            return
        before = [one for one in map(_mark, islice(waiting, key)) if one is not None]
        last = max(mark, self._last or mark, *(one + self._moved for one in before))
        ahead = found + self._moved - last
        leaps = not -self._back <= ahead <= self._gap
        if leaps or key <= 1:
            self.excused.add(mark)
        if not leaps and key <= 1:
            step = packet.duration or self._timing.length(self._timing.interval_s)
            gap_s = float((ahead - step) * self._timing.time_base)
            time_s = self._timing.time_s(last + step)
            if gap_s > _MISSING_S:
                self._on_missing(time_s, gap_s)
            else:
                self._on_join(time_s)

    def _settle_leap(self, packet: Any, mark: int, last: int, later: list[int | None]) -> bool:
        """Set the shift for a packet whose stamp leaps from `last`; return True if it begins a new
        count.
        """
        at = mark + self.shift
        step = packet.duration or self._timing.length(self._timing.interval_s)
        stays = _stays(at, last, step, [one + self.shift for one in later if one is not None])
        if at > last and mark <= self._limit:
            # Slides are shown for about as long as those before them.
            confirmed = at - last <= 2 * self._longest or at <= self._confirmed
            ends = len(later) < _LEAST_REORDERED and not packet.is_keyframe
            credible = stays and (self._timing.declared_s is not None or at - last <= self._pause)
            if credible or ((stays is None or ends) and (confirmed or at - last <= self._gap)):
                self._moved, self._longest = self.shift, max(self._longest, at - last)
                return False
        if last + step > self._limit:
            # Damaged lengths of frames must not add up to hours either.
            step = self._timing.length(_TICK_S)
        # The first of them by time follows; packets are reordered.
        run = [
            one
            for one in later[:_LEAST_REORDERED]
            if one is not None and abs(one - mark) <= self._reorder
        ]
        self._moved = last + step - min([mark, *run])
        time_s = self._timing.time_s(last + step)
        if stays and mark <= self._limit:
            self.shift = self._moved
            self._on_join(time_s)
            return bool(packet.is_keyframe)
        self._on_damage(time_s, f"time stamps jump to {self._timing.time_s(at):.0f} s")
        return False

    def _read_ahead(
        self, packets: Iterator[Any], waiting: deque[Any], packet: Any, mark: int, last: int
    ) -> None:
        """Let packets wait until they tell what becomes of the stamps after a packet."""
        least = _LEAST_PACKETS if packet.is_keyframe else _LEAST_REORDERED
        size = sum(one.size for one in waiting)
        near = self._timing.length(_CONFIRM_S) if mark + self._moved - last > self._gap else -1
        latest = _mark(waiting[-1]) if waiting else None
        while len(waiting) < _CONFIRM_PACKETS and size < _CONFIRM_BYTES:
            enough = len(waiting) >= least and latest is not None and abs(latest - mark) > near
            if enough or (one := next(packets, None)) is None:
                return
            waiting.append(one)
            size = size + one.size
            latest = _mark(one)


def _mark(packet: Any) -> int | None:
    found: int | None = packet.pts if packet.pts is not None else packet.dts
    return found


def _stays(at: int, last: int, step: int, later: list[int]) -> bool | None:
    """Return whether stamps that leap from `last` to `at` go on there, and not where they were;
    None if none follow.
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
    bursts. Frames keep their own spacing while it agrees with their arrival within `slack_s`; else
    the arrival counts. `clock` gives seconds that only go forward. `later_s` is how much later the
    times are than the frames' own.
    """

    def __init__(self, slack_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._slack_s = slack_s
        self._clock = clock
        self.later_s = 0.0
        self._began_s: float | None = None
        self._last_s = -_TICK_S
        self._last_own_s: float | None = None
        self._agreed = False  # `later_s` is that of this count

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
