"""Read a stream with PyAV: one connection, and its frames as they come.

Cameras, network streams and pipes are read once. A video on a web server, which declares an end, is read like a file:
every reading connects again and begins at the beginning. Pipes and such videos have the times that a file would have;
a live stream has those of `ArrivalClock`. Lines of text tracks come with the frames.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import av

from protokv.errors import SourceUnreadable
from protokv.video import address
from protokv.video.clock import ArrivalClock
from protokv.video.connection import HLS_SLACK_S, KINDS, connect, explain_failure
from protokv.video.container import MAX_PIXELS, convert_to_rgb
from protokv.video.decoding import MOST_DEMUX_FAILURES, FrameDecoding, read_packets
from protokv.video.probe import look_into
from protokv.video.report import DecodeReport
from protokv.video.source import Damage, Frame, FrameRequest, Line, ShouldStop, Source, SourceInfo, drop_before, never
from protokv.video.text_tracks import find_text_tracks, read_packet

# Time without a packet, in seconds, after which a connection is lost.
TIMEOUT_S = 20.0

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
        self._kind, self._name = address.source_kind(self._source), address.public_name(self._source)
        self._from_s = 0.0
        self._connection = ExitStack()
        self._why = ""
        # Lines with their track, in the time of the container, and those that have their stream time.
        self._waiting: list[tuple[int, Line]] = []
        self._new_lines: list[tuple[int, Line]] = []
        try:
            self._frames: Iterator[Any] | None = self._connect(should_stop)
        except BaseException:
            self._connection.close()
            raise

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
        if self._frames is None and self.info.seekable:
            self._frames = self._connect(should_stop)
        frames, self._frames, self._should_stop = self._frames or iter(()), None, should_stop
        for decoded in frames:
            frame = self._decoding.place(decoded)
            if should_stop():
                return
            self._place_lines()
            if frame is not None:
                yield frame
        self._place_lines()

    def _place_lines(self) -> None:
        """Give the lines that wait for it their stream time."""
        placed = ((number, line.shift(self._decoding.later_s)) for number, line in self._waiting)
        self._new_lines += [one for one in placed if one[1].end_s > self._from_s]
        del self._new_lines[:-MOST_WAITING]
        self._waiting.clear()

    def _connect(self, should_stop: ShouldStop) -> Iterator[Any]:
        """Connect, and look at the first frame; give the decoder's frames."""
        self._connection.close()
        self._should_stop = should_stop
        container, stream, notes = self._connection.enter_context(
            connect(self._source, self._options, self._timeout_s, self._max_pixels, lambda: self._should_stop())
        )
        hls = "hls" in container.format.name
        # FFmpeg loads no text of HLS by default, and gives its times on another clock than those of the pictures.
        self.texts = () if hls else find_text_tracks(container)
        # A playlist has a size of its own.
        listed = {"hls", "dash"} & set(container.format.name.split(","))
        sized = bool(container.duration) or (not listed and (container.size or 0) > 0)
        ends = self._kind in ("http", "https") and sized
        live = not ends and self._kind != address.PIPE
        packets = self._packets(container, stream)
        try:
            found = look_into(self._name, self._kind, container, stream, packets, self._max_pixels)
        except SourceUnreadable as error:
            raise self._explain(error, container) from error
        for note in (*notes, *found.notes):
            self.add_note(note)
        width, height = self._size or (found.info.width, found.info.height)
        self.info: SourceInfo = replace(found.info, width=width, height=height, seekable=ends)
        if ends:
            # A video on a server is told from others by its address, size and length.
            whole_s = (container.duration or 0) / av.time_base
            digest = hashlib.sha256(f"{self._name} {container.size} {whole_s}".encode()).hexdigest()
            self.info = replace(self.info, duration_s=found.probe.duration_s or whole_s or None, fingerprint=digest)
        slack_s = HLS_SLACK_S if hls else KINDS[self._kind].slack_s if live else 0.0
        self._report = DecodeReport()
        self._decoding = FrameDecoding(
            found.probe,
            stream,
            self._report,
            lambda frame: convert_to_rgb(frame, self.info),
            arrivals=ArrivalClock(slack_s) if live else None,
            on_note=self.add_note,
        )
        return self._decoding.frames(self._decoding.settle(found.packets), lambda: self._should_stop())

    def _explain(self, error: SourceUnreadable, container: Any) -> SourceUnreadable:
        """Say why nothing came, if the connection did."""
        if not self._why:
            return error
        hint = error.hint
        if self._kind in ("http", "https") and "mov" in container.format.name:
            # FFmpeg says only "Input/output error".
            hint = (
                "an MP4 with its index at the end needs a server that gives parts of a file (HTTP ranges): "
                "download it first, or write it with -movflags faststart"
            )
        return SourceUnreadable(f"{error.message} ({self._why})", hint=hint)

    def _packets(self, container: Any, stream: Any) -> Iterator[Any]:
        """Give the packets of the pictures; lines of text wait for them."""

        def lose(error: Exception) -> None:
            # The connection is lost; the caller decides what comes next.
            self._why = self._why or explain_failure(error, self._timeout_s)

        streams = [stream, *(container.streams[one.number] for one in self.texts)]
        failures = MOST_DEMUX_FAILURES if self._kind == address.PIPE else 0
        for packet in read_packets(container, streams, lose, failures):
            if self._should_stop():
                return
            if packet.stream.index == stream.index:
                yield packet
            elif (line := read_packet(packet, packet.stream)) is not None:
                self._waiting.append((packet.stream.index, line))
                del self._waiting[:-MOST_WAITING]
