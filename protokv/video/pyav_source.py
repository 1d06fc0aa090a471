"""Read a video file with PyAV: one pass, which decodes and counts losses.

Reading goes on after packets that cannot be decoded. Frames are converted to RGB only when somebody looks at them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

from protokv.errors import SourceUnreadable
from protokv.video.container import SHOWING_MEMORY, convert_to_rgb, explain_error, open_container
from protokv.video.probe import Probe
from protokv.video.report import DecodeReport
from protokv.video.source import Damage, Frame, FrameRequest, Image, Lines, ShouldStop, Source, drop_before, never
from protokv.video.stamps import FileClock
from protokv.video.text_tracks import read_text_track

# Seconds to look back, one after the other, if a seek did not land at or before the wanted time.
LOOK_BACK_S = (0.0, 2.0, 10.0, 60.0, math.inf)

# The first frame of these is a key frame; others may be recorded from anywhere in a stream.
BEGINNING_WITH_KEY = {"mov", "matroska", "avi"}

# These containers have no index, or none of the whole file.
WITHOUT_INDEX = {"mpegts", "mpeg", "h264", "hevc", "flv"}

# Failures of the demultiplexer in a row, and packets in a row of streams that it does not know.
MOST_DEMUX_FAILURES, MOST_STRANGERS = 16, 1 << 20

# A file that ends this many seconds before the end that it declares is not cut short.
HONEST_S = 0.5

# Bytes of packets that wait while the key frame before a time is looked for.
WAITING_BYTES = 256 << 20


class PyAVSource(Source):
    """Reads one file with PyAV. See `Source` for the contract."""

    decoder = "pyav"

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self._report = DecodeReport()
        self.info = replace(probe.info, decoder=self.decoder)
        self.texts = probe.texts

    def lines(self, number: int) -> Lines:
        """See `Source`."""
        return read_text_track(self.probe.path, number, float(self.probe.origin * self.probe.time_base))

    @property
    def damage(self) -> Damage:
        """See `Source`."""
        return self._report.damage

    def _read(self, wanted: FrameRequest) -> Iterator[Frame]:
        if wanted.from_beginning or wanted.start_s <= 0:
            self._report = DecodeReport(0.0 if wanted.from_beginning else wanted.start_s)
            yield from self._from_beginning(wanted)
            return
        given_s = -1.0
        for frame in self._from_key(wanted):
            # A decoder conceals damage by earlier frames, so only a reading from the beginning gives the same frames.
            if self._report.met_damage:
                break
            given_s = frame.time_s
            yield frame
        if self._report.met_damage and not wanted.should_stop():
            self._report = DecodeReport(wanted.start_s)
            yield from (frame for frame in self._from_beginning(wanted) if frame.time_s > given_s)

    def _from_beginning(self, wanted: FrameRequest) -> Iterator[Frame]:
        with open_container(self.probe.path, self.probe.max_pixels) as (container, stream):
            sent = read_packets(self.probe, container, stream, 0.0, self._report)
            frames = decode(self.probe, stream, sent, self._report, wanted.should_stop)
            yield from drop_before(frames, wanted.start_s)

    def _from_key(self, wanted: FrameRequest) -> Iterator[Frame]:
        """Decode from a key frame at or before the start; from the beginning if no seek leads to one."""
        by_reading = self.info.container in WITHOUT_INDEX
        for back_s in (math.inf,) if by_reading else LOOK_BACK_S:
            from_s = max(0.0, wanted.start_s - back_s)
            self._report = report = DecodeReport(wanted.start_s)
            with open_container(self.probe.path, self.probe.max_pixels) as (container, stream):
                try:
                    sent = read_packets(self.probe, container, stream, from_s, report)
                    if by_reading:
                        sent = skip_to_key(self.probe, sent, wanted.start_s)
                    after_key = by_reading or from_s > 0
                    given = decode(self.probe, stream, sent, report, wanted.should_stop, drop_leading=after_key)
                    first = next(given, None)
                except Exception as error:
                    if from_s <= 0:
                        raise unreadable(self.probe, error) from error
                    continue  # this container cannot seek: look further back
                if wanted.should_stop():
                    return
                if from_s > 0 and (first is None or first.time_s > wanted.start_s):
                    continue
                if first is not None:
                    yield from drop_before(chain([first], given), wanted.start_s)
                return


def read_packets(probe: Probe, container: Any, stream: Any, from_s: float, report: DecodeReport) -> Iterator[Any]:
    """Give the packets of the video stream, from the key frame at or before `from_s` (0: from the start) to the end.

    A demultiplexer that fails in the middle of the file is asked again. At the end the report learns of packets that
    the file promises and does not hold.
    """
    if from_s > 0:
        container.seek(probe.ticks(from_s), stream=stream, backward=True, any_frame=False)
    failures = strangers = 0
    last_dts: int | None = None
    end_s = 0.0
    demux = container.demux(stream)
    while True:
        try:
            packet = next(demux)
        except StopIteration:
            break
        except Exception as error:
            # IndexError: a packet of a stream that appeared in the middle of the file. PyAV drops it.
            strangers += isinstance(error, IndexError)
            failures += not isinstance(error, IndexError)
            if strangers > MOST_STRANGERS or failures > MOST_DEMUX_FAILURES:
                report.note_failure(None, explain_error(error))
                break
            demux = container.demux(stream)
            continue
        if packet.size == 0:
            continue
        failures = strangers = 0
        last_dts = packet.dts if packet.dts is not None else last_dts
        ticks = packet.pts if packet.pts is not None and probe.has_pts else packet.dts
        if ticks is not None and (time_s := probe.time_s(ticks)) <= probe.timeline.limit_s:
            stated_s = float((packet.duration or 0) * probe.time_base)
            end_s = max(end_s, time_s + (probe.timeline.duration_s(time_s, stated_s) or 0.0))
        yield packet
    _check_end(probe, stream, report, last_dts, end_s)


def _check_end(probe: Probe, stream: Any, report: DecodeReport, last_dts: int | None, end_s: float) -> None:
    """Count frames that the index or the declared end promises after the last packet, which ends at `end_s`."""
    why = "the file ends before the end that it declares"
    # Honest files are off by up to half a second, or two frames.
    honest_s = max(HONEST_S, 2 * probe.interval_s)
    if probe.indexed:
        after = probe.ticks(report.start_s) - 1 if last_dts is None else last_dts
        if missing := sum(entry.timestamp > after for entry in stream.index_entries):
            report.note_missing(missing, end_s, why)
            return
        # An edit list may cut away what the declared end counts, and not to the second.
        honest_s = max(2.0, 0.25 * (probe.info.duration_s or 0.0))
    gap_s = (probe.info.duration_s or 0.0) - max(end_s, report.start_s)
    if gap_s > honest_s:
        report.note_missing(max(1, round(gap_s / probe.interval_s)), end_s, why)


def skip_to_key(probe: Probe, packets: Iterator[Any], start_s: float) -> Iterator[Any]:
    """Skip to the last key frame before the first packet that is later than `start_s`.

    This replaces a seek where there is no index: FFmpeg guesses by time stamps, and lands elsewhere in a damaged file.
    If too much would have to wait, reading begins at the first key frame that waits.
    """
    waiting: list[Any] = []
    size = 0
    for packet in packets:
        time_s = probe.expected_s(packet)
        if packet.is_keyframe and (time_s is None or time_s <= start_s):
            waiting, size = [], 0
        waiting.append(packet)
        size += packet.size
        if size > WAITING_BYTES or (time_s is not None and time_s > start_s):
            break
    yield from waiting
    yield from packets


def decode(
    probe: Probe,
    stream: Any,
    packets: Iterable[Any],
    report: DecodeReport,
    should_stop: ShouldStop = never,
    *,
    drop_leading: bool = False,
) -> Iterator[Frame]:
    """Decode packets in order, to the last one or until `should_stop`, and report them.

    With `drop_leading`, after a seek, frames shown before the first key frame are dropped: they need packets that are
    not here, and never count as lost. A frame marked as corrupt may show old memory of the decoder: that
    depends on which frames the caller still keeps.
    """
    one = _Pass(probe, stream.codec_context, report, drop_leading)
    for packet in chain(packets, [None]):
        if should_stop():
            return
        if packet is not None:
            one.expect(packet)
        for decoded in one.decode(packet):
            if (frame := one.place(decoded)) is not None:
                yield frame
    report.finish()


class _Pass:
    """One pass of a decoder over packets, and the account of it."""

    def __init__(self, probe: Probe, context: Any, report: DecodeReport, drop_leading: bool) -> None:
        context.flush_buffers()
        self._probe, self._context, self._report, self._drop_leading = probe, context, report, drop_leading
        self._pixels = SHOWING_MEMORY.get(context.name, b"")
        self._clock = FileClock(probe.timeline, report.start_s if drop_leading else 0.0)
        self._key_s: float | None = None  # time of the first key frame
        self._last_ticks: int | None = None
        self._corrupt_s: set[float] = set()  # times of frames whose packets the container marked as corrupt

    def expect(self, packet: Any) -> None:
        """Note the frame that a packet should give, if it is one of those that can be decoded."""
        due_s = self._probe.expected_s(packet)
        if self._key_s is None and packet.is_keyframe:
            self._key_s = due_s if due_s is not None else -math.inf
        if due_s is None:
            return
        if packet.is_corrupt:
            self._corrupt_s.add(due_s)
        # A file begins with a key frame, unless it was recorded out of a stream.
        whole = not self._drop_leading and self._probe.info.container in BEGINNING_WITH_KEY
        decodable = whole if self._key_s is None else self._key_s <= due_s
        if decodable and due_s <= self._probe.timeline.limit_s:
            self._report.expect(due_s)

    def decode(self, packet: Any) -> list[Any]:
        """Return the decoder's frames for a packet, or its last ones for None. What fails is reported."""
        try:
            if self._pixels and packet is not None and self._pixels not in bytes(packet):
                raise ValueError("a picture without pixels")
            return list(self._context.decode(packet))
        except Exception as error:  # PyAV raises more than its own errors on damaged packets
            if packet is not None:
                self._report.note_failure(self._probe.expected_s(packet), explain_error(error))
            return []

    def place(self, decoded: Any) -> Frame | None:
        """Return a decoded frame at its time; None if it is to be left out."""
        probe, report = self._probe, self._report
        ticks = probe.stamp(decoded)
        if ticks is None:
            # AVI gives no times for the last frames: they follow at the stated rate.
            step = max(1, round(probe.interval_s / float(probe.time_base)))
            ticks = probe.origin if self._last_ticks is None else self._last_ticks + step
        if decoded.interlaced_frame:
            # The two fields of a frame may come in two packets.
            report.stop_matching()
        stamped_s = probe.time_s(ticks)
        if self._drop_leading and self._key_s is not None and stamped_s < self._key_s:
            return None
        time_s, leaps = self._clock.place(stamped_s, probe.interval_s)
        if leaps:
            report.note_damage(time_s, f"time stamps jump to {stamped_s:.0f} s")
        if not report.take(time_s, stamped_s, corrupt=bool(decoded.is_corrupt) or stamped_s in self._corrupt_s):
            return None
        self._corrupt_s.discard(stamped_s)
        self._last_ticks = ticks
        stated_s = float(decoded.duration * probe.time_base) if decoded.duration else None
        return Frame(time_s, _converter(decoded, probe), probe.timeline.duration_s(time_s, stated_s), "pyav")


def _converter(frame: Any, probe: Probe) -> Callable[[], Image]:
    def convert() -> Image:
        try:
            return convert_to_rgb(frame, probe.info)
        except Exception as error:
            raise unreadable(probe, error) from error

    return convert


def unreadable(probe: Probe, error: Exception) -> SourceUnreadable:
    """Turn an error of PyAV in the middle of a file into an error for users."""
    return SourceUnreadable(
        f"{probe.path.name} cannot be read on: {explain_error(error)}", hint="the file is damaged; copy or repair it"
    )
