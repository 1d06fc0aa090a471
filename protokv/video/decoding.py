"""From the packets of a video stream to its frames: one pass, which decodes, and the account of what is lost.

Reading goes on after packets that cannot be decoded. Frames are converted to RGB only when somebody looks at them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any

from protokv.video.clock import ArrivalClock, Clock, limit_duration
from protokv.video.container import explain_error
from protokv.video.probe import SHOWING_MEMORY, Probe
from protokv.video.source import Damage, Frame, Image, ShouldStop

# The first frame of these is a key frame; others may be recorded from anywhere in a stream.
_BEGINNING_WITH_KEY = {"mov", "matroska", "avi"}

# The header of these states a length; that of others comes from their last time stamps, or from their bytes.
_STATING = {"mov", "flv", "asf"}

# A source that ends this many seconds before the end that it declares is not cut short.
_HONEST_S = 0.5

# Failures of the demultiplexer in a row, and packets in a row of streams that it does not know.
MOST_DEMUX_FAILURES, _MOST_STRANGERS = 16, 1 << 20

# Bytes of packets that wait while the key frame before a time is looked for.
_WAITING_BYTES = 256 << 20


class DecodeReport:
    """The account of one reading from `start_s` on: which frames went into a decoder, came back, and are lost.

    Decoders give frames in order of presentation. A frame that is older than one that came back will never come, so
    only awaited frames are kept and memory does not grow with the video.

    Attributes:
        start_s: where the reading begins.
        last_s: time of the last frame that came back.
        met_damage: a decoder met damage, counted or not. Frames missing at the end of a file do not count here.
    """

    def __init__(self, start_s: float = 0.0) -> None:
        self.start_s, self.last_s, self.met_damage = start_s, None, False
        self._matching, self._awaited = True, set[float]()
        self._lost = self._damaged = 0
        self._from_s: float | None = None
        self._why = ""

    last_s: float | None

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
            self.note_damage(time_s, "a frame is marked as corrupt")
        return True

    def finish(self) -> None:
        """Count every frame that is still awaited as lost: the decoder has given all it had."""
        self._settle(list(self._awaited))

    def stop_matching(self) -> None:
        """Count reported failures only: packets and frames of this stream are not one to one."""
        self._matching = False
        self._awaited.clear()

    def note_damage(self, time_s: float, why: str) -> None:
        """Count a frame that is given although its picture or its time stamp is damaged."""
        self.met_damage = True
        if time_s >= self.start_s:
            self._damaged += 1
            self._note(time_s, why)

    def note_failure(self, time_s: float | None, why: str) -> None:
        """Note that a decoder refused a packet. If frames are matched, the missing frame counts, not the packet."""
        self.met_damage = True
        if time_s is not None and time_s < self.start_s:
            return
        counted = time_s is None or not self._matching
        self._lost += counted
        self._note((self.last_s if time_s is None else time_s) if counted else None, why)

    def note_missing(self, frames: int, from_s: float) -> None:
        """Count frames that the file promises from `from_s` on and does not hold."""
        self._lost += frames
        self._note(from_s, "the file ends before the end that it declares")

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
            self._note(min(times))

    def _note(self, time_s: float | None, why: str = "") -> None:
        self._why = self._why or why
        if time_s is not None:
            self._from_s = time_s if self._from_s is None else min(self._from_s, time_s)


def read_packets(
    container: Any, streams: Any, on_failure: Callable[[Exception], None], failures: int = MOST_DEMUX_FAILURES
) -> Iterator[Any]:
    """Give the packets of streams. A demultiplexer that fails is asked again, so many times in a row."""
    failed = strangers = 0
    demux = container.demux(streams)
    while True:
        try:
            packet = next(demux)
        except StopIteration:
            return
        except Exception as error:
            # IndexError: a packet of a stream that appeared in the middle of the file. PyAV drops it.
            strangers += isinstance(error, IndexError)
            failed += not isinstance(error, IndexError)
            if strangers > _MOST_STRANGERS or failed > failures:
                on_failure(error)
                return
            demux = container.demux(streams)
            continue
        if packet.size:
            failed = strangers = 0
            yield packet


def skip_to_key(probe: Probe, packets: Iterator[Any], start_s: float) -> Iterator[Any]:
    """Skip to the last key frame before the first packet that is later than `start_s`.

    If too much would have to wait, reading begins at the first key frame that waits.
    """
    waiting: list[Any] = []
    size = 0
    for packet in packets:
        later = packet is not None and probe.latest_s(packet) > start_s
        if packet is not None and packet.is_keyframe and not later:
            waiting, size = [], 0
        waiting.append(packet)
        size += packet.size if packet is not None else 0
        if later or size > _WAITING_BYTES:
            break
    yield from waiting
    yield from packets


class FrameDecoding:
    """One pass of a decoder over the packets of a stream, and the account of it."""

    def __init__(
        self,
        probe: Probe,
        stream: Any,
        report: DecodeReport,
        convert: Callable[[Any], Image],
        *,
        sought: bool = False,
        after_key: bool = False,
        arrivals: ArrivalClock | None = None,
        on_note: Callable[[str], None] = lambda note: None,
    ) -> None:
        """Begin before the first packet of PyAV's stream; with `sought`, after a seek.

        `convert` makes a picture of PyAV's frame, when somebody looks at it. With `after_key`, frames shown before the
        first key frame are dropped: they need packets that are not here, and never count as lost. A live stream has its
        times from `arrivals`, and its frames are not matched with packets. `on_note` is told what is no damage.
        """
        if arrivals is not None:
            report.stop_matching()
        stream.codec_context.flush_buffers()
        self._probe, self._stream, self._context, self._report = probe, stream, stream.codec_context, report
        self._convert, self._drop_leading, self._arrivals = convert, after_key, arrivals
        self._pixels = SHOWING_MEMORY.get(self._context.name, b"")
        self._key_s: float | None = None  # time of the first key frame since the count began
        self._next_ticks = probe.origin  # where a frame without a time stamp follows
        self._corrupt_s: set[float] = set()  # times of frames whose packets the container marked as corrupt
        self._last_dts: int | None = None
        self._end_s = 0.0
        self._clock = Clock(
            probe.time_base,
            probe.origin,
            probe.interval_s,
            probe.declared_s,
            probe.confirmed_s,
            from_origin=not sought,
            on_join=lambda time_s: on_note(f"at {time_s:.2f} s another recording is joined on: times go on"),
            on_damage=report.note_damage,
        )

    @property
    def later_s(self) -> float:
        """How much later the stream time is than the container's own, now."""
        if self._arrivals is not None:
            return self._arrivals.later_s
        return float((self._clock.shift - self._probe.origin) * self._probe.time_base)

    def settle(self, packets: Iterator[Any]) -> Iterator[Any]:
        """Give packets on the one clock of the reading, and None before those that begin a new count."""
        if self._arrivals is not None:
            yield from self._arrivals.settle(packets)
            return
        for packet in self._clock.settle(map(self._watch, packets)):
            ticks = packet and self._probe.stamp(packet)
            if ticks is not None:
                time_s = self._probe.time_s(ticks)
                self._end_s = max(self._end_s, time_s + (self._stays_s(time_s, packet) or 0.0))
            yield packet

    def _watch(self, packet: Any) -> Any:
        self._last_dts = packet.dts if packet.dts is not None else self._last_dts
        return packet

    def _stays_s(self, time_s: float, one: Any) -> float | None:
        stated_s = float((one.duration or 0) * self._probe.time_base)
        return limit_duration(time_s, stated_s, self._probe.declared_s)

    def frames(self, packets: Iterable[Any], should_stop: ShouldStop) -> Iterator[Frame]:
        """Give the frames of settled packets, to the last one or until `should_stop`."""
        for packet in chain(packets, [None]):
            if should_stop():
                return
            if packet is not None:
                self._expect(packet)
            for decoded in self._decode(packet):
                if (frame := self._place(decoded)) is not None and not should_stop():
                    yield frame
            if packet is None:
                # What comes next does not refer to what came before.
                self._context.flush_buffers()
                self._drop_leading, self._key_s = self._drop_leading or self._key_s is not None, None
        self._report.finish()
        if self._arrivals is None:
            self.check_end()

    def _expect(self, packet: Any) -> None:
        """Note the frame that a packet should give, if it is one of those that can be decoded."""
        due_s = self._probe.expected_s(packet)
        if self._key_s is None and packet.is_keyframe:
            self._key_s = due_s if due_s is not None else -math.inf
        if due_s is None:
            return
        if packet.is_corrupt:
            self._corrupt_s.add(due_s)
        # A file begins with a key frame, unless it was recorded out of a stream.
        whole = not self._drop_leading and self._probe.container in _BEGINNING_WITH_KEY
        if whole if self._key_s is None else self._key_s <= due_s:
            self._report.expect(due_s)

    def _decode(self, packet: Any) -> list[Any]:
        """Return the decoder's frames for a packet, or its last ones for None. What fails is reported."""
        try:
            if self._pixels and packet is not None and self._pixels not in bytes(packet):
                raise ValueError("a picture without pixels")
            return list(self._context.decode(packet))
        except Exception as error:  # PyAV raises more than its own errors on damaged packets
            if packet is not None:
                self._report.note_failure(self._probe.expected_s(packet), explain_error(error))
            return []

    def _place(self, decoded: Any) -> Frame | None:
        """Return a decoded frame at its time; None if it is to be left out."""
        probe, report, ticks = self._probe, self._report, self._probe.stamp(decoded)
        picture = partial(self._convert, decoded)
        if self._arrivals is not None:
            time_s = self._arrivals(None if ticks is None else float(ticks * probe.time_base))
            if time_s is None:
                return None
            report.take(time_s, corrupt=decoded.is_corrupt)
            return Frame(time_s, picture, None, "pyav")
        # AVI gives no times for the last frames, and raw streams give none at all.
        ticks = self._next_ticks if ticks is None else ticks - probe.delay
        if decoded.interlaced_frame:
            # The two fields of a frame may come in two packets.
            report.stop_matching()
        time_s = probe.time_s(ticks)
        if self._drop_leading and self._key_s is not None and time_s < self._key_s:
            return None
        if time_s < 0:
            report.note_damage(0.0, "a picture is before the beginning")
            return None
        corrupt = (decoded.is_corrupt or time_s in self._corrupt_s) and ticks not in self._clock.excused
        if not report.take(time_s, corrupt=corrupt):
            return None
        self._corrupt_s.discard(time_s)
        self._next_ticks = ticks + (decoded.duration or max(1, round(probe.interval_s / float(probe.time_base))))
        return Frame(time_s, picture, self._stays_s(time_s, decoded), "pyav")

    def check_end(self) -> None:
        """Count frames that the index or the stated end promises after the last packet."""
        probe, report, end_s = self._probe, self._report, self._end_s
        # Honest files are off by up to half a second, or two frames; a length that is guessed, by more.
        honest_s = max(_HONEST_S, 2 * probe.interval_s)
        if probe.indexed:
            after = probe.ticks(report.start_s) - 1 if self._last_dts is None else self._last_dts
            if missing := sum(entry.timestamp > after for entry in self._stream.index_entries):
                report.note_missing(missing, end_s)
                return
            # An edit list may cut away what the declared end counts, and not to the second.
            honest_s = max(2.0, 0.25 * (probe.duration_s or 0.0))
        elif probe.declared_s is None:
            honest_s = max(2.0, 0.02 * (probe.duration_s or 0.0))
            if probe.container not in _STATING:
                return
        gap_s = (probe.duration_s or 0.0) - max(end_s, report.start_s)
        if gap_s > honest_s:
            report.note_missing(max(1, round(gap_s / probe.interval_s)), end_s)
