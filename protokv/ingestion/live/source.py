"""`LiveSource`: a live source in an ingest, its steps, its wall clock log, and the events about it.

It joins the feed (frames and news from a thread) to the run that watches steps: it groups frames, closes a step that a
loss cuts short, and counts gaps and dropped frames. `open_stream` opens a source that is read as a stream.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from protokv.errors import SourceError, SourceUnreadable
from protokv.ingestion.events import FramesDropped, SourceLost, SourceRecovered
from protokv.ingestion.live.reader import Connection, ConnectionEnd, Feed, SampledFrame
from protokv.ingestion.options import LiveOptions
from protokv.state.sources import SourcePart
from protokv.state.wall_clock import WallClockLog
from protokv.video import Damage, Source, SourceInfo, address
from protokv.video.sampling import Sample, Step, make_step
from protokv.video.source import Frame, FrameRequest, Line, never

# A silence of more than this is a gap, even if the source was never lost.
GAP_S = 5.0

# A waiting run asks again after this many seconds whether to stop.
ASK_S = 0.1

# Dropped frames before the two rates are reported: fewer may be a hiccup.
MANY = 8


class LiveSource(Source):
    """A source that goes on whether it is read or not: its `steps` are read, not its frames. See `Source`.

    Attributes:
        options: of its reading.
        info: its name and kind; complete after the first connection.
        log: its running times, gaps and losses.
        texts: the text tracks of the connection; none before the first one.
    """

    streams_text = True

    def __init__(
        self,
        text: str,
        options: LiveOptions,
        connect: Callable[..., Source],
        opened: Source | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Prepare; nothing is opened.

        Args:
            text: the address.
            options: of its reading.
            connect: opens it: `connect(should_stop, size)`.
            opened: the first connection, if there is one already.
            clock: as for `Feed`.
            now: as for `Feed`.
        """
        self.options, self._text, self._connect, self._opened = options, text, connect, opened
        self._clock, self._now = clock, now
        self._feed: Feed | None = None
        kind = address.source_kind(text)
        self.info = SourceInfo(address.public_name(text), kind, "pyav", "", "", "", 0, 0, 0, None, seekable=False)
        self.log = WallClockLog()
        self.texts = ()
        self._reading: Source | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """Those of the latest connection."""
        return self._reading.notes if self._reading is not None else ()

    def new_lines(self) -> Sequence[tuple[int, Line]]:
        """Return what came since the last call, as a `Source`, in time counted from the start of the segment."""
        lines = self._feed.lines if self._feed is not None else deque()
        return [lines.popleft() for _ in range(len(lines))]

    @property
    def damage(self) -> Damage:
        """None: `log` counts what is lost and damaged."""
        return Damage()

    def _read(self, request: FrameRequest) -> Iterator[Frame]:
        raise SourceUnreadable(f"{self.info.name} is live", hint="give it to ingest")

    def close(self) -> None:
        """End the thread and the connection. May be called more than once."""
        if self._feed is not None:
            self._feed.close()
        if self._opened is not None:
            self._opened.close()

    def continue_from(self, record: Mapping[str, Any], stream_s: float) -> None:
        """Go on in the stream of a state at `stream_s`, whose record of this source is `record`.

        Raises:
            StateCorrupt: the record makes no sense.
        """
        found = WallClockLog.read(record)
        if found is None:
            return
        self.log = found
        size = [record.get(name) for name in ("width", "height")]
        if all(type(one) is int and one > 0 for one in size):
            self.info = replace(self.info, width=size[0], height=size[1])  # type: ignore[arg-type]
        found.begin_gap(stream_s, "nobody watched")

    def record(self, stream_s: float) -> dict[str, Any]:
        """Return the source's record in a state at a commit."""
        self.log.committed_at = self._now()
        if not self.log.anchors:
            self.log.add_anchor(stream_s, self._now())
        return {**self.info.to_dict(), "fingerprint": self.log.stream, "live": asdict(self.log)}

    def steps(
        self, fps: float, frames_per_step: int, segment: SourcePart, stream_s: float, should_stop: Callable[[], bool]
    ) -> Iterator[Step | SourceLost | SourceRecovered | FramesDropped | None]:
        """Give steps in stream time counted from the start of the segment, news, and None while nothing comes.

        Args:
            fps: samples a second.
            frames_per_step: samples that make a step.
            segment: the part of the stream that this source fills.
            stream_s: where the stream stands.
            should_stop: asked often.

        Raises:
            SourceError: the source has been lost for too long, or nothing can be read from it.
        """
        log = self.log
        self._feed = feed = self._start_feed(fps, segment, stream_s)
        dropped, damaged = log.frames_dropped, log.frames_damaged
        made = StepMaker(self, fps, frames_per_step, segment.start_s, self._clock)
        while not should_stop():
            news = feed.mailbox.get(ASK_S)
            log.frames_dropped = dropped + feed.mailbox.dropped
            log.frames_damaged = damaged + feed.frames_damaged
            if news is None:
                yield None
            elif isinstance(news, SampledFrame):
                yield from made.take(news, feed.mailbox.dropped)
            elif isinstance(news, Connection):
                yield from made.connect(news, feed.mailbox.dropped)
            else:
                yield from made.lose(news)
                if news.error is not None:
                    raise news.error
                if news.ended:
                    return

    def _start_feed(self, fps: float, segment: SourcePart, stream_s: float) -> Feed:
        elapsed_s: float | None = None
        if self.log.anchors:
            since_stream_s, since_s = self.log.anchors[-1]
            elapsed_s = max(0.0, self._now() - since_s + since_stream_s - segment.start_s)
        feed = Feed(
            self._open,
            self._text,
            self.options,
            fps=fps,
            from_s=stream_s - segment.start_s,
            elapsed_s=elapsed_s,
            clock=self._clock,
            now=self._now,
        )
        feed.start()
        return feed

    def _open(self, should_stop: Callable[[], bool]) -> Source:
        opened, self._opened = self._opened, None
        if opened is None:
            opened = self._connect(should_stop, (self.info.width, self.info.height) if self.info.width else None)
        self._reading = opened
        return opened


class StepMaker:
    """Makes steps and events of what the feed of a live source gives, and keeps the source's log.

    A step that a loss or a gap cuts short is filled with its last frame.
    """

    def __init__(
        self, source: LiveSource, fps: float, frames_per_step: int, start_s: float, clock: Callable[[], float]
    ) -> None:
        self._source, self._fps, self._n, self._start_s, self._clock = source, fps, frames_per_step, start_s, clock
        # The step that has begun, how many were made, and the first slot that none of them reaches.
        self._group: list[Sample] = []
        self._made = self._next_slot = 0
        self._away_s: float | None = None
        # Of the connection: when it began, the frames watched, and how many were dropped before it.
        self._since_s, self._watched, self._dropped = clock(), 0, 0
        self._drops_reported = False

    def take(self, news: SampledFrame, dropped: int) -> Iterator[Step | FramesDropped]:
        """Add a frame, when so many were dropped in all."""
        if news.silent_s > GAP_S:
            yield from self._end_step()
            since_s = self._start_s + news.slot / self._fps
            self._source.log.begin_gap(since_s - news.silent_s, "no frames came")
            self._source.log.end_gap(since_s)
        if self._group or news.slot >= self._next_slot:
            if not self._group:
                self._next_slot = news.slot + self._n
            self._group.append(Sample(news.slot / self._fps, news.image, news.decoder))
        if len(self._group) == self._n:
            yield from self._end_step()
        self._watched += 1
        lost, passed_s = dropped - self._dropped, self._clock() - self._since_s
        if lost >= MANY and passed_s > 0 and not self._drops_reported:
            self._drops_reported = True
            yield FramesDropped((self._watched + lost) / passed_s, self._watched / passed_s)

    def _end_step(self) -> Iterator[Step]:
        """Give the step that has begun, if one has: the next frames do not follow on its last one."""
        if self._group:
            group, self._group = self._group, []
            yield make_step(self._made, group, self._n)
            self._made += 1

    def connect(self, news: Connection, dropped: int) -> Iterator[SourceRecovered]:
        """Begin a connection, when so many frames were dropped in all."""
        source, begins_s = self._source, self._start_s + news.stream_s
        source.texts = news.texts
        source.log.add_anchor(begins_s, news.real_s)
        # Frames keep the size of the first ones for the life of the stream.
        width, height = source.info.width or news.info.width, source.info.height or news.info.height
        source.info = replace(news.info, width=width, height=height)
        self._since_s, self._watched, self._dropped = self._clock(), 0, dropped
        if gap := source.log.end_gap(begins_s):
            yield SourceRecovered(source.info.name, begins_s, begins_s - gap.from_s)
        elif self._away_s is not None:
            # The stream begins only now, so the wait is no gap in it.
            yield SourceRecovered(source.info.name, begins_s, self._clock() - self._away_s)
        self._away_s = None

    def lose(self, news: ConnectionEnd) -> Iterator[Step | SourceLost]:
        """End a connection."""
        yield from self._end_step()
        lost_s = self._start_s + news.stream_s
        if news.ended:
            return
        if self._source.log.anchors:
            self._source.log.begin_gap(lost_s, news.why)
        if self._away_s is None:
            self._away_s = self._clock()
            yield SourceLost(self._source.info.name, lost_s, news.why)


def open_stream(source: str | os.PathLike[str], options: LiveOptions, max_pixels: int | None) -> Source | None:
    """Open a source that is read as a stream; return None for a file.

    A video on a server, which has an end, is read like a file; every other source is a `LiveSource`.

    Raises:
        SourceError: it is not there, or not one frame of it can be read.
    """
    text = os.fspath(source)
    kind = address.source_kind(text)
    if kind not in address.STREAMED:
        return None
    connect, opened = partial(_connect, text, options, max_pixels), None
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


def _connect(
    text: str,
    options: LiveOptions,
    max_pixels: int | None,
    should_stop: Callable[[], bool] = never,
    size: tuple[int, int] | None = None,
) -> Source:
    from protokv.video.stream import StreamSource

    stall_s = options.lost_after_s(address.source_kind(text))
    return StreamSource(
        text,
        max_pixels=max_pixels,
        should_stop=should_stop,
        options=dict(options.input),
        timeout_s=min(stall_s, 1e6),
        size=size,
    )
