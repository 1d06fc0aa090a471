"""Read video with PyAV: files, pipes, cameras and network streams, in one class.

A file, and a video on a web server, which declares an end, are opened anew by every reading.
Cameras, other network streams and pipes are read once, as they come. A live stream has the times of
`ArrivalClock`, all others those of `PacketClock`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import av
from av.video.reformatter import VideoReformatter

from protokv.errors import ProtoKVError, SourceUnreadable
from protokv.mini import WORLD_COMMENT
from protokv.texts import Keywords
from protokv.video import address
from protokv.video.clock import ArrivalClock
from protokv.video.container import (
    MAX_FRAME_PIXELS,
    SOURCE_TIMEOUT_S,
    Pipe,
    explain_ffmpeg_error,
    open_container,
)
from protokv.video.decoding import FrameDecoder, skip_to_key_frame
from protokv.video.joined import TS_PACKET_BYTES, JoinedPart
from protokv.video.losses import FrameLosses
from protokv.video.probe import StreamProbe, choose_video_stream, convert_frame_to_rgb, probe_stream
from protokv.video.source import (
    Frame,
    FrameRequest,
    Image,
    ShouldStop,
    Source,
    SourceDamage,
    SubtitleLines,
    drop_frames_before,
    never_stop,
)
from protokv.video.text_tracks import find_text_tracks, read_text_track

# These containers have an index, and one clock from beginning to end. A seek aims this much
# earlier: FFmpeg goes by the times of decoding.
_WITH_INDEX = {"mov", "matroska", "avi", "asf", "mxf"}
_EARLIER_S = 2.0

# How far a frame's time stamp may be from its arrival: HLS delivers whole segments, and the first
# ones are minutes old.
_SLACK_S = 2.0
_HLS_SLACK_S = 60.0

# Failures in a row of the demultiplexer of a file, which is asked again.
_MOST_FAILURES = 1000

# Recordings that were put together in one file.
_MOST_PARTS = 1000


class _Opened(NamedTuple):
    """One opening of the source, for one reading."""

    container: Any
    stream: Any
    losses: FrameLosses
    found: StreamProbe


class AVSource(Source):
    """One video, read with PyAV. See `Source` for the contract, and `open_container` for the
    arguments.

    All frames are scaled to the width and height in `size`; None: those of the first frame.
    `should_stop` is asked while opening waits for a pipe; once it returns True, opening fails.
    SourceError: as `open_container`, or no picture can be read.
    """

    decoder = "pyav"

    def __init__(
        self,
        source: str | os.PathLike[str],
        max_pixels: int | None = None,
        *,
        options: Mapping[str, str] | None = None,
        timeout_s: float = SOURCE_TIMEOUT_S,
        size: tuple[int, int] | None = None,
        should_stop: ShouldStop = never_stop,
    ) -> None:
        self.source = os.fspath(source)
        self._max_pixels = max_pixels or MAX_FRAME_PIXELS
        self._size = size
        self._options = options or {}
        self._timeout_s = timeout_s
        self._kind, self._name = address.source_kind(self.source), address.name_source(self.source)
        # holds the file, and goes with this source
        self.copy: TemporaryDirectory[str] | None = None
        self._losses = FrameLosses()
        self._reformatter = VideoReformatter()
        self._why = ""
        self._found: StreamProbe | None = None
        self._opened: _Opened | None = self._open(should_stop)
        # Packets hold this source, which would stay until Python looks for cycles.
        self._found = self._opened.found._replace(packets=iter(()))
        self._describe(self._opened.container, self._found)
        if self._kind == "file":
            # A damaged file gives other frames to a decoder that has seen its beginning.
            self._opened.container.close()
            self._opened = None

    @property
    def damage(self) -> SourceDamage:
        """See `Source`."""
        return self._losses.damage

    @property
    def notes(self) -> tuple[str, ...]:
        """See `Source`."""
        for note in self._losses.notes:
            self.add_note(note)
        return self._notes

    def lines(self, number: int) -> SubtitleLines:
        """See `Source`."""
        return read_text_track(Path(self.source), number, -self.timing.time_s(0))

    def close(self) -> None:
        """End any reading, and the connection; remove the copy of a file that was fetched."""
        super().close()
        # Let go of the last `should_stop`: it may hold a session, which holds this source.
        self._should_stop: ShouldStop = lambda: True
        if self._opened is not None:
            self._opened.container.close()
        if self.copy is not None:
            self.copy.cleanup()

    def _open(self, should_stop: ShouldStop = never_stop) -> _Opened:
        """Open the source; the first time, look at its first frame."""
        self._should_stop = should_stop
        losses = FrameLosses()
        container, stream, notes = self._connect(self._options)
        self.texts = find_text_tracks(container) if self._kind == "file" else ()
        packets = self._packets(self._begin_part(container, stream), losses)
        if self._found is not None:
            return _Opened(container, stream, losses, self._found._replace(packets=packets))
        try:
            found = probe_stream(self._name, self._kind, container, stream, packets)
        except SourceUnreadable as error:
            raise SourceUnreadable(error.message + self._why, hint=error.hint) from error
        except Exception as error:  # PyAV raises more than its own errors on a damaged file
            raise self._unreadable(error) from error
        for note in (*notes, *found.notes):
            self.add_note(note)
        return _Opened(container, stream, losses, found)

    def _describe(self, container: Any, found: StreamProbe) -> None:
        """Set what stays the same for every reading."""
        self.timing = found.timing
        self.plain = found.plain
        info = found.info
        is_file = self._kind == "file"
        # A fragmented MP4 has no index.
        indexed = info.container in _WITH_INDEX and (found.indexed or info.container != "mov")
        self._indexed = indexed and is_file
        forms = set(container.format.name.split(","))
        # A playlist has a size of its own.
        sized = container.duration or (not forms & {"hls", "dash"} and (container.size or 0) > 0)
        ends = is_file or (self._kind in ("http", "https") and bool(sized))
        live_slack_s = _HLS_SLACK_S if "hls" in forms else _SLACK_S
        self._slack_s = None if ends or self._kind == address.PIPE else live_slack_s
        name = address.redact_source(self.source)
        width, height = self._size or (info.width, info.height)
        drawn = container.metadata.get("comment") == WORLD_COMMENT
        info = replace(info, name=name, width=width, height=height, seekable=ends, drawn=drawn)
        if is_file:
            info = replace(info, decoder=self.decoder, duration_s=self.timing.duration_s)
        elif ends:
            # A video on a server is told from others by its address, size and length.
            whole_s = (container.duration or 0) / av.time_base
            digest = hashlib.sha256(f"{name} {container.size} {whole_s}".encode()).hexdigest()
            lasts_s = self.timing.duration_s or whole_s or None
            info = replace(info, duration_s=lasts_s, fingerprint=digest)
        self.info = info

    def _packets(self, part: JoinedPart, losses: FrameLosses) -> Iterator[Any]:
        yield from self._demux(part, losses)
        for _ in range(_MOST_PARTS):
            if (found := self._open_next(part)) is None:
                return
            part = found
            with part.container:
                yield from self._demux(part, losses)

    def _open_next(self, part: JoinedPart) -> JoinedPart | None:
        """Open what follows a part; None at the end."""
        if not part.ended or self._should_stop():
            return None
        begin = 0 if part.pipe is not None else part.end
        if part.pipe is not None:
            part.pipe.rewind()
        options = {
            **self._options,
            # The last picture of before is not given to the next decoder.
            "skip_initial_bytes": str(begin + TS_PACKET_BYTES),
            # FFmpeg looks for the length at the end, where yet another recording may be.
            "skip_estimate_duration_from_pts": "1",
        }
        try:
            container, stream, _ = self._connect(options, part.pipe, part.known)
        except ProtoKVError:
            return None
        return self._begin_part(container, stream, begin)

    def _connect(
        self,
        options: Mapping[str, str],
        pipe: Pipe | None = None,
        known: Collection[tuple[int, str]] = (),
    ) -> tuple[Any, Any, list[str]]:
        """Open a container; return it, the stream to watch, and notes for the user."""
        container = open_container(
            self.source,
            self._max_pixels,
            options,
            self._timeout_s,
            lambda: self._should_stop(),
            pipe,
        )
        return container, *choose_video_stream(container, self._name, self._max_pixels, known)

    def _begin_part(self, container: Any, stream: Any, begin: int = 0) -> JoinedPart:
        path = self.source if self._kind == "file" else None
        return JoinedPart(container, stream, begin, path)

    def _demux(self, part: JoinedPart, losses: FrameLosses) -> Iterator[Any]:
        failed = 0
        demux = part.demux()
        while not self._should_stop():
            try:
                packet = next(demux)
            except StopIteration:
                return
            except IndexError:
                # PyAV drops the packets of a stream that was not there when it was opened.
                demux = part.demux()
                continue
            except Exception as error:
                failed += 1
                if failed <= _MOST_FAILURES and self._kind in ("file", address.PIPE):
                    demux = part.demux()
                    continue
                if self._kind == "file":
                    losses.note_failure(None, explain_ffmpeg_error(error))
                # The connection is lost; the caller decides what comes next.
                self._why = f" ({explain_ffmpeg_error(error, self._timeout_s)})"
                return
            if packet.size:
                failed = 0
                if part.take(packet):
                    yield packet
                if part.over or part.becomes_another():
                    return

    def _read(self, wanted: FrameRequest) -> Iterator[Frame]:
        if not self.info.seekable:
            wanted = wanted._replace(start_s=0.0)
        given_s = -1.0
        if wanted.start_s > 0 and not wanted.from_beginning:
            for frame in drop_frames_before(self._decode(wanted, from_key=True), wanted.start_s):
                # A decoder conceals damage by earlier frames: only a reading from the beginning
                # gives the same frames.
                if self._losses.met:
                    break
                given_s = frame.time_s
                yield frame
            if not self._losses.met or wanted.should_stop():
                return
        frames = self._decode(wanted)
        frames = drop_frames_before(frames, wanted.start_s) if wanted.start_s > 0 else frames
        yield from (frame for frame in frames if frame.time_s > given_s)

    def _decode(self, wanted: FrameRequest, *, from_key: bool = False) -> Iterator[Frame]:
        """Decode from the beginning or, if asked, from the last key frame before the start."""
        opened = self._opened
        self._opened = None
        if opened is None and not self.info.seekable:
            return
        opened = opened or self._open()
        sought = None
        if from_key and self._indexed and (sought := self._seek(opened, wanted.start_s)) is None:
            opened = self._open()
        self._should_stop = wanted.should_stop
        self._losses = opened.losses
        self._losses.start_s = 0.0 if wanted.from_beginning else wanted.start_s
        with opened.container:
            decoding = self._start_decoding(opened, after_key=from_key, sought=sought is not None)
            settled = decoding.settle(sought or opened.found.packets)
            if from_key:
                settled = skip_to_key_frame(self.timing, settled, wanted.start_s)
            yield from decoding.frames(settled, wanted.should_stop)

    def _seek(self, opened: _Opened, start_s: float) -> Iterator[Any] | None:
        """Return the packets from a key frame at or before a time on; None if no seek leads to
        one.
        """
        try:
            opened.container.seek(
                self.timing.ticks(max(0.0, start_s - _EARLIER_S)), stream=opened.stream
            )
            packets = self._packets(
                self._begin_part(opened.container, opened.stream), opened.losses
            )
            first = next(packets)
        except Exception:  # this container cannot seek
            return None
        return (
            chain([first], packets)
            if first.is_keyframe and self.timing.latest_s(first) <= start_s
            else None
        )

    def _start_decoding(self, opened: _Opened, **begun: bool) -> FrameDecoder:
        arrivals = None if self._slack_s is None else ArrivalClock(self._slack_s)
        more: Keywords = {"arrivals": arrivals, **begun}
        return FrameDecoder(opened.found, opened.stream, opened.losses, self._convert, **more)

    def _convert(self, frame: Any) -> Image:
        try:
            return convert_frame_to_rgb(frame, self.info, self._reformatter)
        except Exception as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> SourceUnreadable:
        name = address.redact_source(self.source)
        return SourceUnreadable(
            f"{name} cannot be read: {explain_ffmpeg_error(error)}",
            hint="the file is damaged; copy or repair it",
        )
