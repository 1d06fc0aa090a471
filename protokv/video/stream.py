"""Read a stream with PyAV: one connection, its frames as they come, and a count of losses.

Cameras, network streams and pipes are read once, and `Stamps` gives the times of their frames. A video on a web server,
which declares an end, is read like a file: every reading connects again and begins at the beginning. Lines of text
tracks come with the frames.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import av

from protokv.errors import SourceUnreadable
from protokv.video import address
from protokv.video.connection import HLS_SLACK_S, KINDS, connect, explain_failure
from protokv.video.container import MAX_PIXELS, convert_to_rgb, describe_stream, explain_error, refuse_size
from protokv.video.report import DecodeReport
from protokv.video.source import (
    Damage,
    Frame,
    FrameRequest,
    Line,
    ShouldStop,
    Source,
    SourceInfo,
    drop_before,
    never,
)
from protokv.video.stamps import Stamps
from protokv.video.text_tracks import find_text_tracks, line_from

# Time without a packet, in seconds, after which a connection is lost.
TIMEOUT_S = 20.0

# Packets whose decoding times run back by more than this many seconds begin a new count.
ANEW_S = 1.0

# A stream that ends this many seconds before its declared end is not cut short: ends are rounded, and guessed.
HONEST_S = 2.0

# Lines of text that wait for a frame, or to be taken.
MOST_WAITING = 300


class StreamSource(Source):
    """Reads one stream with PyAV, and waits for its first frame on opening. See `Source` for the contract.

    A source that is not seekable goes on where it stands and ignores `start_s`.

    Args:
        source: an address (`protokv.video.address`).
        max_pixels: the most that a frame may have; None: 8K.
        options: for FFmpeg.
        timeout_s: how long to wait for the connection, and for every packet.
        size: width and height of the frames to give; None: those of the first frame.
        should_stop: asked while a pipe is waited for; opening fails once it returns True.

    Raises:
        SourceError: as `connect`, or no picture can be had.
    """

    streams_text = True

    def __init__(
        self,
        source: str | os.PathLike[str],
        max_pixels: int | None = None,
        *,
        options: Mapping[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
        size: tuple[int, int] | None = None,
        should_stop: ShouldStop = never,
    ) -> None:
        self._source, self._size = os.fspath(source), size
        self._options, self._timeout_s, self._max_pixels = options or {}, timeout_s, max_pixels or MAX_PIXELS
        self._from_s = 0.0
        self._name = address.public_name(self._source)
        self._connection = ExitStack()
        self._why = ""
        # Lines with their track, in the time of the container, and those that have their stream time.
        self._waiting: list[tuple[int, Line]] = []
        self._new_lines: list[tuple[int, Line]] = []
        self._decoded = self._connect(should_stop)
        first = next(self._decoded, None)
        if first is None:
            hint = "check that it is a video, and that its codec is one that FFmpeg reads"
            if address.source_kind(self._source) in ("http", "https") and "mov" in self._container.format.name:
                # FFmpeg says only "Input/output error".
                hint = (
                    "an MP4 with its index at the end needs a server that gives parts of a file (HTTP ranges): "
                    "download it first, or write it with -movflags faststart"
                )
            self._connection.close()
            raise SourceUnreadable(
                f"no frame of {self._name} can be decoded{f' ({self._why})' if self._why else ''}", hint=hint
            )
        self._first: Any = first
        self.info = self._describe(first)

    @property
    def damage(self) -> Damage:
        """See `Source`."""
        return self._report.damage

    def new_lines(self) -> Sequence[tuple[int, Line]]:
        """See `Source`."""
        new, self._new_lines = self._new_lines, []
        return new

    def close(self) -> None:
        """End any reading, and the connection."""
        super().close()
        self._connection.close()

    def _read(self, wanted: FrameRequest) -> Iterator[Frame]:
        if not self.info.seekable:
            return self._go_on(wanted.should_stop)
        self._from_s = wanted.start_s
        return drop_before(self._go_on(wanted.should_stop), wanted.start_s)

    def _go_on(self, should_stop: ShouldStop) -> Iterator[Frame]:
        if self._first is None and self.info.seekable:
            self._decoded = self._connect(should_stop)
        frames = chain([] if self._first is None else [self._first], self._decoded)
        self._first = None
        self._should_stop = should_stop
        slack_s = math.inf if self.info.seekable or self.info.kind == address.PIPE else self._slack_s
        stamps = Stamps(slack_s, 1 / (self.info.rate_fps or 25.0))
        report = self._report
        later_s = 0.0  # how much later the stream's time is than the container's
        for frame in frames:
            if frame is None:
                self._place(later_s)
                stamps.begin_anew()
                continue
            own_s = None if frame.pts is None else float(frame.pts * self._stream.time_base)
            time_s = stamps(own_s)
            if should_stop():
                return
            if time_s is None:
                continue
            later_s = later_s if own_s is None else time_s - own_s
            self._place(later_s)
            report.take(time_s, corrupt=frame.is_corrupt)
            yield Frame(time_s, partial(convert_to_rgb, frame, self.info), None, "pyav")
        self._place(later_s)
        declared_s, last_s = self.info.duration_s, report.last_s or 0.0
        if declared_s is not None and last_s < declared_s - max(HONEST_S, 0.02 * declared_s) and not should_stop():
            missing = max(1, round((declared_s - last_s) * (self.info.rate_fps or 1.0)))
            report.note_missing(missing, last_s, "it ends before the end that it declares")

    def _place(self, later_s: float) -> None:
        """Give the lines that wait for it their stream time."""
        placed = ((number, line.shift(later_s)) for number, line in self._waiting)
        self._new_lines += [one for one in placed if one[1].end_s > self._from_s]
        del self._new_lines[:-MOST_WAITING]
        self._waiting.clear()

    def _connect(self, should_stop: ShouldStop = never) -> Iterator[Any]:
        self._connection.close()
        self._should_stop = should_stop
        self._container, self._stream = self._connection.enter_context(
            connect(self._source, self._options, self._timeout_s, self._max_pixels, lambda: self._should_stop())
        )
        # FFmpeg loads no text of HLS by default, and gives its times on another clock than those of the pictures.
        self.texts = () if "hls" in self._container.format.name else find_text_tracks(self._container)
        self._ends = address.source_kind(self._source) in ("http", "https") and bool(self._container.duration)
        self._report = DecodeReport()
        # A stream has no times of packets to hold the frames against.
        self._report.stop_matching()
        return self._decode(self._container, self._stream)

    def _packets(self, container: Any, stream: Any) -> Iterator[Any]:
        streams = [stream, *(container.streams[one.number] for one in self.texts)]
        packets = container.demux(streams)
        while not self._should_stop():
            try:
                packet = next(packets, None)
            except IndexError:  # a packet of a stream that appeared meanwhile
                packets = container.demux(streams)
                continue
            except (av.error.FFmpegError, OSError, EOFError) as error:
                # The connection is lost; the caller decides what comes next.
                self._why = self._why or explain_failure(error, self._timeout_s)
                return
            if packet is None:
                return
            if packet.stream.index == stream.index:
                yield packet
            elif (line := line_from(packet, packet.stream)) is not None:
                self._waiting.append((packet.stream.index, line))
                del self._waiting[:-MOST_WAITING]

    def _decode(self, container: Any, stream: Any) -> Iterator[Any]:
        """Give frames as the decoder gives them, and None where time stamps begin anew.

        A packet that cannot be decoded is counted, and the next one is tried.
        """
        last_dts: int | None = None
        for packet in self._packets(container, stream):
            if packet.dts is not None:
                if last_dts is not None and (last_dts - packet.dts) * stream.time_base > ANEW_S:
                    if packet.is_keyframe:
                        # Frames that the decoder still holds belong to the old count.
                        with suppress(Exception):
                            yield from stream.codec_context.decode(None)
                        stream.codec_context.flush_buffers()
                    yield None
                last_dts = packet.dts
            try:
                frames = stream.codec_context.decode(packet if packet.size else None)
            except av.error.EOFError:
                return
            except Exception as error:  # PyAV raises more than its own errors on damaged packets
                self._why = self._why or explain_error(error)
                self._report.note_failure(None, explain_error(error))
                continue
            for frame in frames:
                if frame.width * frame.height > self._max_pixels:
                    raise refuse_size(self._name, frame.width, frame.height, self._max_pixels)
                yield frame

    def _describe(self, first: Any) -> SourceInfo:
        container, stream, kind = self._container, self._stream, address.source_kind(self._source)
        info = describe_stream(self._name, kind, container, stream, first)
        hls = info.container == "hls"
        self._slack_s = HLS_SLACK_S if hls else KINDS[kind].slack_s if kind in KINDS else math.inf
        rate = stream.average_rate or stream.guessed_rate
        width, height = self._size or (info.width, info.height)
        info = replace(info, width=width, height=height, rate_fps=float(rate) if rate else None, seekable=self._ends)
        if not self._ends:
            return info
        # A video on a server is told from others by its address, size and length.
        duration_s = container.duration / av.time_base
        digest = hashlib.sha256(f"{self._name} {container.size} {duration_s}".encode()).hexdigest()
        return replace(info, duration_s=duration_s, fingerprint=digest)
