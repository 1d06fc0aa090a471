"""Live sources in an ingest: `LiveSource`, and the thread that reads it (`_Feed`).

The thread connects, samples frames, notices a loss, and connects again. The times of every
connection begin at 0. Here they become stream times, at multiples of the sampling interval, each at
most once and never back: the first frame of an interval is sampled. Between two connections, stream
time goes on with real time. The source keeps a log of gaps and dropped frames. Knows no models or
memories.
"""

from __future__ import annotations

import math
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial

from protokv.errors import (
    ConfigError,
    ProtoKVError,
    SourceDenied,
    SourceError,
    SourceNotFound,
    SourceUnreadable,
)
from protokv.ingestion.events import FramesDropped, SourceLost, SourceRecovered
from protokv.ingestion.mailbox import LiveConnection, LiveConnectionEnd, LiveQueue
from protokv.ingestion.options import LiveOptions
from protokv.ingestion.prefetch import STOP_POLL_S
from protokv.state.sources import StreamSegment, WallClockLog
from protokv.stream.pushed import STREAM_GAP_S
from protokv.texts import JsonObject, JsonRecord
from protokv.video import Source, SourceDamage, SourceInfo
from protokv.video.address import (
    PIPE,
    STREAMED_SOURCES,
    check_source_address,
    redact_source,
    source_kind,
)
from protokv.video.sampling import SampledFrame, VideoStep, make_video_step
from protokv.video.source import Frame, FrameRequest, ShouldStop

# Dropped frames before the two rates are reported: fewer may be a hiccup.
_MANY = 8

# A thread that has to end is waited for this long: FFmpeg may wait for the network longer, and ends
# by itself.
_LEAVE_S = 2.0

# FFmpeg reads on as long as anything comes, and PyAV gives no packet of a stream that is new.
_STUCK = "no picture comes, although the source sends: they may have another PID"

# Steps that wait for the model.
_ROOM = 8

# Its own: a thread that draws from Python's generator disturbs whoever has seeded it.
_JITTER = random.Random()


class LiveSource(Source):
    """A source that goes on whether it is read or not: its `steps` are read, not its frames. See
    `Source`.

    `info` is complete after the first connection, and `log` has its running times, gaps and losses.
    `clock` gives seconds that only go forward, and `now` those since 1970.
    """

    def __init__(
        self,
        address: str,
        options: LiveOptions,
        connect: Callable[..., Source],
        opened: Source | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Prepare. `connect(should_stop=, size=)` opens the source; `opened` is the first
        connection, if there is one.
        """
        self.address = address
        self.options = options
        self._connect = connect
        self._opened = opened
        self.clock = clock
        self.now = now
        name = redact_source(address)
        kind = source_kind(address)
        self.info = SourceInfo(name, kind, "pyav", "", "", "", 0, 0, 0, None, seekable=False)
        self.log = WallClockLog()
        self._feed: _Feed | None = None
        self._reading: Source | None = None
        self._away_s: float | None = None
        # seconds from the clock that only goes forward to the clock of the day, at the last anchor
        self._ahead_s: float | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """Those of the latest connection."""
        return self._reading.notes if self._reading is not None else ()

    @property
    def frames_dropped(self) -> int:
        """Sampled frames that this run has dropped by now."""
        return self._feed.mailbox.dropped if self._feed else 0

    @property
    def damage(self) -> SourceDamage:
        """Of a pipe, which is read once. Of others none: `log` counts what is lost and damaged."""
        once = self._reading if source_kind(self.address) == PIPE else None
        return once.damage if once is not None else SourceDamage()

    def _read(self, request: FrameRequest) -> Iterator[Frame]:
        raise SourceUnreadable(f"{self.info.name} is live", hint="give it to ingest")

    def close(self) -> None:
        """End the thread and the connection. May be called more than once."""
        if self._feed is not None:
            self._feed.close()
        if self._opened is not None:
            self._opened.close()

    def continue_from(self, record: JsonRecord, stream_s: float) -> None:
        """Go on in the stream of a state at `stream_s`. StateCorrupt if its record of this source
        makes no sense.
        """
        if (found := WallClockLog.read(record)) is not None:
            self.log = found
            width = record.get("width")
            height = record.get("height")
            if isinstance(width, int) and isinstance(height, int) and min(width, height) > 0:
                self.info = replace(self.info, width=width, height=height)
            found.begin_gap(stream_s, "nobody watched")

    def record(self, stream_s: float) -> JsonObject:
        """Return the source's record in a state at a commit."""
        self.log.committed_at = now_s = self.now()
        real_s = now_s
        if self.log.anchors and self._ahead_s is not None:
            # The clock of the day may have been set since the last anchor. Do not compare stream
            # time with it: a model that lags behind the camera would look like a clock that was
            # set.
            real_s = self.log.real_time(stream_s) + now_s - self.clock() - self._ahead_s
        if not self.log.anchors or self._ahead_s is not None:
            self._anchor(stream_s, real_s)
        return {**asdict(self.info), "fingerprint": self.log.stream, "live": asdict(self.log)}

    def steps(
        self,
        fps: float,
        frames_per_step: int,
        segment: StreamSegment,
        stream_s: float,
        should_stop: ShouldStop,
        poll_s: float = STOP_POLL_S,
    ) -> Iterator[VideoStep | SourceLost | SourceRecovered | FramesDropped | None]:
        """Give steps in stream time counted from the start of the segment, news, and None if
        nothing comes for `poll_s`.

        `segment` is the part of the stream that this source fills, and the stream stands at
        `stream_s`. `should_stop` is asked often. SourceError: the source has been lost for too
        long, or nothing can be read from it.
        """
        log = self.log
        start_s = segment.start_s
        elapsed_s = None
        if log.anchors:
            since_stream_s, since_s = log.anchors[-1]
            elapsed_s = max(0.0, self.now() - since_s + since_stream_s - start_s)
        self._feed = feed = _Feed(self, fps, frames_per_step, stream_s - start_s, elapsed_s)
        dropped = log.frames_dropped
        damaged = log.frames_damaged
        watched = 0
        reported = False
        while not should_stop():
            item = feed.mailbox.get(poll_s)
            lost = feed.mailbox.dropped
            log.frames_dropped = dropped + lost
            log.frames_damaged = damaged + feed.frames_damaged
            if isinstance(item, VideoStep):
                yield item
                watched += len(item.decoders)
                if lost >= _MANY and not reported:
                    reported = True
                    yield FramesDropped(fps, fps * watched / (watched + lost))
            elif isinstance(item, LiveConnection):
                yield from self._begin(item, start_s + item.stream_s)
            elif isinstance(item, LiveConnectionEnd):
                yield from self._lose(item, start_s + item.stream_s)
                if item.ended:
                    return
            else:
                if feed.is_stuck:
                    yield from self._lose(
                        LiveConnectionEnd(feed.end_s, _STUCK), start_s + feed.end_s
                    )
                    feed.close()
                    since_s = self.clock() - feed.began_s
                    self._feed = feed = _Feed(self, fps, frames_per_step, feed.end_s, since_s)
                    dropped = log.frames_dropped
                    damaged = log.frames_damaged
                yield None

    def _anchor(self, stream_s: float, real_s: float) -> None:
        if self.log.add_anchor(stream_s, real_s) or self._ahead_s is None:
            self._ahead_s = self.now() - self.clock()

    def _begin(self, item: LiveConnection, stream_s: float) -> Iterator[SourceRecovered]:
        self._anchor(stream_s, item.real_s)
        # Frames keep the size of the first ones for the life of the stream.
        width = self.info.width or item.info.width
        height = self.info.height or item.info.height
        self.info = replace(item.info, width=width, height=height)
        if gap := self.log.end_gap(stream_s):
            yield SourceRecovered(self.info.name, stream_s, stream_s - gap.from_s)
        elif self._away_s is not None:
            # The stream begins only now, so the wait is no gap in it.
            yield SourceRecovered(self.info.name, stream_s, self.clock() - self._away_s)
        self._away_s = None

    def _lose(self, item: LiveConnectionEnd, stream_s: float) -> Iterator[SourceLost]:
        if item.error is not None and item.ended:
            raise item.error
        if not item.ended and self.log.anchors:
            self.log.begin_gap(stream_s, item.why)
        if not item.ended and self._away_s is None:
            self._away_s = self.clock()
            yield SourceLost(self.info.name, stream_s, item.why)

    def connect(self, should_stop: ShouldStop) -> Source:
        """Open the next connection."""
        opened = self._opened
        self._opened = None
        if opened is None:
            size = (self.info.width, self.info.height) if self.info.width else None
            opened = self._connect(should_stop=should_stop, size=size)
        self._reading = opened
        return opened


class _Feed:
    """The steps and news of a live source, from its own thread. A step that is cut short gets its
    last frame again.
    """

    def __init__(
        self,
        source: LiveSource,
        fps: float,
        frames_per_step: int,
        from_s: float,
        elapsed_s: float | None,
    ) -> None:
        """Begin to read `source`, at stream time `from_s`, with `fps` samples a second.

        `elapsed_s` is real time since the stream began; None: it begins with the first frame.
        """
        kind = source_kind(source.address)
        options = source.options
        self.mailbox = LiveQueue(_ROOM, wait=options.waits(kind))
        self._source = source
        self._clock = source.clock
        self._fps = fps
        self._n = frames_per_step
        # The step that has begun, and the first slot that no step reaches; a slot is 1 / fps.
        self._group: list[SampledFrame] = []
        self._next_slot = math.ceil(from_s * fps - 1e-6)
        self._stall_s = options.lost_after_s(kind)
        self._once = kind == PIPE
        self._began_s = None if elapsed_s is None else self._clock() - elapsed_s
        self._alive_s: float | None = None  # the last frame came then; None: not connected
        self.frames_damaged = 0  # or could not be decoded
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="protokv-feed", daemon=True)
        self._thread.start()

    @property
    def is_stuck(self) -> bool:
        """True if the reader of a connection has not come back long after it should have given
        up.
        """
        alive_s = self._alive_s
        return alive_s is not None and self._clock() - alive_s > 2 * self._stall_s

    @property
    def end_s(self) -> float:
        """The stream time after the last frame."""
        return self._next_slot / self._fps

    @property
    def began_s(self) -> float:
        """The real time at stream time 0, once there was a frame."""
        return self._clock() if self._began_s is None else self._began_s

    def close(self) -> None:
        """End the thread, even while it waits."""
        self._stop.set()
        self.mailbox.close()
        self._thread.join(_LEAVE_S)

    def _run(self) -> None:
        lost_s: float | None = None
        first_s, longest_s = self._source.options.retry_s
        give_up_s = self._source.options.give_up_s
        pause_s = first_s
        while not self._stop.is_set():
            since_s = self._clock()
            frames, why, error = self._read()
            if self._stop.is_set():
                return
            now_s = self._clock()
            end_s = self.end_s
            self._end_step()
            lost_s = now_s if frames or lost_s is None else lost_s
            # The time of the attempt is a part of the pause: a listener waits for its publisher.
            pause_s = first_s if frames else pause_s
            # Many readers of one camera do not come back in step.
            wait_s = max(0.0, pause_s * _JITTER.uniform(0.5, 1.0) - (now_s - since_s))
            pause_s = min(2 * pause_s, longest_s)
            # Do not retry a wrong address, unless the user said for how long. Cameras lock out a
            # client that tries a password again and again.
            wrong = (ConfigError, SourceDenied, *([SourceNotFound] if give_up_s is None else []))
            # It never gave a frame, to this run or to an earlier one.
            hopeless = self._next_slot == 0 and isinstance(error, wrong)
            if (
                hopeless
                or self._once
                or (give_up_s is not None and now_s + wait_s - lost_s >= give_up_s)
            ):
                if not (self._once and frames):
                    hint = "look at the source; --give-up says how long it is tried again"
                    error = error or SourceError(f"the source is lost: {why}", hint=hint)
                self.mailbox.put(LiveConnectionEnd(end_s, why, ended=True, error=error))
                return
            self.mailbox.put(LiveConnectionEnd(end_s, why))
            self._stop.wait(wait_s)

    def _read(self) -> tuple[int, str, ProtoKVError | None]:
        """Read one connection to its end; return the number of sampled frames, why it ended, and
        its error.
        """
        alive_s = self._clock()
        frames = 0
        offset_s = 0.0
        fps = self._fps
        damaged = self.frames_damaged

        def stalled() -> bool:
            return self._clock() - alive_s > self._stall_s

        def stop() -> bool:
            return self._stop.is_set() or stalled()

        silence = f"no frame for {self._stall_s:g} s"
        try:
            with self._source.connect(stop) as source:
                self._alive_s = alive_s = self._clock()
                for frame in source.frames(should_stop=stop):
                    self._alive_s = alive_s = self._clock()
                    if not frames:
                        if self._began_s is None:
                            self._began_s = alive_s - frame.time_s
                        elapsed_s = alive_s - frame.time_s - self._began_s
                        offset_s = max(self._next_slot, math.ceil(elapsed_s * fps - 1e-6)) / fps
                        self.mailbox.put(LiveConnection(source.info, offset_s, self._source.now()))
                    slot = math.floor((offset_s + frame.time_s) * fps + 1e-6)
                    if frames and slot - self._next_slot > STREAM_GAP_S * fps:
                        self._end_step()
                    if slot < self._next_slot:
                        continue
                    frames += 1
                    self._next_slot = slot + 1
                    self._group.append(SampledFrame(slot / fps, frame.image, frame.decoder))
                    self.frames_damaged = (
                        damaged + source.damage.frames_lost + source.damage.frames_damaged
                    )
                    if len(self._group) == self._n:
                        self._end_step()
                    if self._stop.is_set():
                        break
                    # Waiting for the model is no silence of the source.
                    self._alive_s = alive_s = self._clock()
                why = source.damage.message
        except ProtoKVError as error:
            if stalled() and not self._stop.is_set():
                return frames, silence, None
            return frames, error.message, error
        finally:
            self._alive_s = None
        return frames, silence if stalled() else why or "the source ended", None

    def _end_step(self) -> None:
        """Give the step that has begun, if one has: the next frames do not follow on its last
        one.
        """
        if self._group:
            step = make_video_step(self._group, self._n)
            self._group = []
            self._next_slot = max(self._next_slot, round(step.time_s * self._fps) + self._n)
            self.mailbox.put(step)


def open_live_source(
    source: str | os.PathLike[str], options: LiveOptions, max_pixels: int | None
) -> Source | None:
    """Open a source that is read as a stream; return None for a file.

    A video on a server, which has an end, is read like a file; every other source is a
    `LiveSource`. SourceError: it is not there, or not one frame of it can be read.
    """
    text = os.fspath(source)
    opened = None
    kind = source_kind(text)
    if kind not in STREAMED_SOURCES:
        return None
    from protokv.video.av_source import AVSource

    # Before a model is loaded.
    check_source_address(text)
    connect = partial(
        AVSource,
        text,
        max_pixels,
        options=options.input,
        timeout_s=min(options.lost_after_s(kind), 1e6),
    )
    if kind in ("http", "https"):
        try:
            opened = connect()
        except SourceError:
            # A playlist may appear later; any other video on a server is there or not.
            if ".m3u8" not in text:
                raise
    if opened is not None and opened.info.seekable:
        return opened
    return LiveSource(text, options, connect, opened)
