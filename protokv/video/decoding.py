"""From the packets of a video stream to its frames: one pass, which decodes and counts losses.

Reading goes on after packets that cannot be decoded. Frames are converted to RGB only when somebody looks at them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any

from protokv.video.clock import REORDER_S, ArrivalClock, Clock, limit_duration
from protokv.video.container import SHOWING_MEMORY, explain_error
from protokv.video.probe import STATING, Probe
from protokv.video.report import DecodeReport
from protokv.video.source import Frame, Image, ShouldStop

# The first frame of these is a key frame; others may be recorded from anywhere in a stream.
BEGINNING_WITH_KEY = {"mov", "matroska", "avi"}

# A source that ends this many seconds before the end that it declares is not cut short.
HONEST_S = 0.5

# Failures of the demultiplexer in a row, and packets in a row of streams that it does not know.
MOST_DEMUX_FAILURES, MOST_STRANGERS = 16, 1 << 20

# Bytes of packets that wait while the key frame before a time is looked for.
WAITING_BYTES = 256 << 20


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
            if strangers > MOST_STRANGERS or failed > failures:
                on_failure(error)
                return
            demux = container.demux(streams)
            continue
        if packet.size:
            failed = strangers = 0
            yield packet


def skip_to_key(probe: Probe, packets: Iterator[Any], start_s: float) -> Iterator[Any]:
    """Skip to the last key frame before the first packet that is later than `start_s`.

    This replaces a seek where there is no index: FFmpeg guesses by time stamps, and lands elsewhere in a damaged file.
    If too much would have to wait, reading begins at the first key frame that waits.
    """
    waiting: list[Any] = []
    size = 0
    for packet in packets:
        if packet is None:
            waiting.append(None)
            continue
        time_s = probe.expected_s(packet)
        if packet.is_keyframe and (time_s is None or time_s <= start_s):
            waiting, size = [], 0
        waiting.append(packet)
        size += packet.size
        if size > WAITING_BYTES or (time_s is not None and time_s > start_s):
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
        self._next_ticks: int | None = None  # where a frame without a time stamp follows
        self._corrupt_s: set[float] = set()  # times of frames whose packets the container marked as corrupt
        self._last_dts: int | None = None
        self._end_s = 0.0
        self._later_s = 0.0
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

    def settle(self, packets: Iterator[Any]) -> Iterator[Any]:
        """Give packets on the one clock of the reading, and None before those that begin a new count."""
        if self._arrivals is not None:
            yield from self._flush_live(packets)
            return
        for packet in self._clock.settle(map(self._watch, packets)):
            ticks = packet and (packet.pts if packet.pts is not None and self._probe.has_pts else packet.dts)
            if ticks is not None:
                time_s = self._probe.time_s(ticks)
                stays_s = limit_duration(time_s, self._seconds(packet.duration), self._probe.declared_s)
                self._end_s = max(self._end_s, time_s + (stays_s or 0.0))
            yield packet

    def _seconds(self, ticks: int | None) -> float:
        return float((ticks or 0) * self._probe.time_base)

    def frames(self, packets: Iterable[Any], should_stop: ShouldStop) -> Iterator[Any]:
        """Give the decoder's frames of settled packets, to the last one or until `should_stop`."""
        for packet in chain(packets, [None]):
            if should_stop():
                return
            if packet is not None:
                self._expect(packet)
            yield from self._decode(packet)
            if packet is None:
                # What comes next does not refer to what came before.
                self._context.flush_buffers()
                self._drop_leading, self._key_s = self._drop_leading or self._key_s is not None, None
        self._report.finish()
        if self._arrivals is None:
            self.check_end()

    @property
    def later_s(self) -> float:
        """How much later the stream time is than the container's own, now."""
        later = float((self._clock.shift - self._probe.origin) * self._probe.time_base)
        return later if self._arrivals is None else self._later_s

    def place(self, decoded: Any) -> Frame | None:
        """Return a decoded frame at its time; None if it is to be left out."""
        probe, report = self._probe, self._report
        picture = partial(self._convert, decoded)
        ticks = probe.stamp(decoded)
        if self._arrivals is not None:
            own_s = None if ticks is None else float(ticks * probe.time_base)
            time_s = self._arrivals(own_s)
            if time_s is None:
                return None
            report.take(time_s, corrupt=decoded.is_corrupt)
            self._later_s = self._later_s if own_s is None else time_s - own_s
            return Frame(time_s, picture, None, "pyav")
        if ticks is None:
            # AVI gives no times for the last frames, and raw streams give none at all.
            ticks = probe.origin if self._next_ticks is None else self._next_ticks
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
        stays_s = limit_duration(time_s, self._seconds(decoded.duration), probe.declared_s)
        return Frame(time_s, picture, stays_s, "pyav")

    def _watch(self, packet: Any) -> Any:
        self._last_dts = packet.dts if packet.dts is not None else self._last_dts
        return packet

    def _flush_live(self, packets: Iterator[Any]) -> Iterator[Any]:
        """Give the packets of a live stream, and None before a key frame whose count begins anew."""
        assert self._arrivals is not None
        for packet in packets:
            last, self._last_dts = self._last_dts, packet.dts if packet.dts is not None else self._last_dts
            if None not in (last, packet.dts) and (last - packet.dts) * self._probe.time_base > REORDER_S:
                self._arrivals.begin_anew()
                if packet.is_keyframe:
                    yield None
            yield packet

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
        whole = not self._drop_leading and self._probe.container in BEGINNING_WITH_KEY
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

    def check_end(self) -> None:
        """Count frames that the index or the stated end promises after the last packet."""
        probe, report, end_s = self._probe, self._report, self._end_s
        why = "the file ends before the end that it declares"
        # Honest files are off by up to half a second, or two frames; a length that is guessed, by more.
        honest_s = max(HONEST_S, 2 * probe.interval_s)
        if probe.indexed:
            after = probe.ticks(report.start_s) - 1 if self._last_dts is None else self._last_dts
            if missing := sum(entry.timestamp > after for entry in self._stream.index_entries):
                report.note_missing(missing, end_s, why)
                return
            # An edit list may cut away what the declared end counts, and not to the second.
            honest_s = max(2.0, 0.25 * (probe.duration_s or 0.0))
        elif probe.declared_s is None:
            honest_s = max(2.0, 0.02 * (probe.duration_s or 0.0))
            if probe.container not in STATING:
                return
        gap_s = (probe.duration_s or 0.0) - max(end_s, report.start_s)
        if gap_s > honest_s:
            report.note_missing(max(1, round(gap_s / probe.interval_s)), end_s, why)
