"""`LiveSource`: a live source in an ingest, its steps, its chronicle, and what is told of it.

Joins the feed (frames and news from a thread) to the run that watches steps: has frames grouped, closes a step that a
loss has cut short, and keeps count of gaps and drops.

`Grouping`: sampled frames of a live source to steps. Knows nothing of how they came.

What is read as a stream, opened: like a file where it has an end or grows, as a `LiveSource` otherwise.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from protokv.errors import SourceError
from protokv.ingestion.events import FramesDropped, SourceLost, SourceRecovered
from protokv.ingestion.live.reader import Connected, Feed, Gone, Rates, Sampled
from protokv.ingestion.options import LiveOptions
from protokv.storage.wall_clock import WallClockLog
from protokv.storage.watched import Segment
from protokv.video import Damage, Source, SourceInfo, address
from protokv.video.address import PIPE
from protokv.video.isolated import IsolatedSource
from protokv.video.registry import SOURCES
from protokv.video.sampling import Sample, Step, make_step
from protokv.video.source import Closing

# A source that gives no frame for longer than this has a gap, even if it was never lost.
GAP_S = 5.0

# How often whoever waits for a frame is asked whether to stop.
ASK_S = 0.1


class LiveSource(Closing):
    """A source that goes on whether it is read or not. It stands in an ingest where a `Source` stands.

    Attributes:
        options: how it is read.
        info: what is known of it; before the first connection, its name and its kind.
        damage: of all connections together.
    """

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
        """Nothing is opened.

        Args:
            text: the address.
            options: how it is read.
            connect: opens it: `connect(should_stop, size)`.
            opened: the first connection, where there is one already.
            clock: seconds that only go forward.
            now: seconds since 1970.
        """
        self.options, self._connect, self._opened = options, connect, opened
        self._clock, self._now = clock, now
        self._feed: Feed | None = None
        kind = address.kind_of(text)
        self.info = SourceInfo(address.shown(text), kind, "pyav", "", "", "", 0, 0, 0, None, seekable=False)
        self._listens = address.listens(text, options.input)
        self._wait = options.on_pressure == "wait" if options.on_pressure else kind == PIPE
        self.damage = Damage()
        self.chronicle = WallClockLog()

    @property
    def waiting(self) -> int:
        """Frames and news that wait for the model."""
        return 0 if self._feed is None else len(self._feed.mailbox)

    def close(self) -> None:
        """End the thread and the connection. May be called more than once."""
        if self._feed is not None:
            self._feed.close()
        if self._opened is not None:
            self._opened.close()

    def continues(self, record: Mapping[str, Any], stream_s: float) -> None:
        """Go on in the stream of a state whose record of this source is `record`, which stands at `stream_s`.

        Raises:
            StateCorrupt: the record makes no sense.
        """
        found = WallClockLog.of(record)
        if found is None:
            return
        self.chronicle = found
        size = [record.get(name) for name in ("width", "height")]
        if all(type(one) is int and one > 0 for one in size):
            self.info = replace(self.info, width=size[0], height=size[1])  # type: ignore[arg-type]
        found.lose(stream_s, "nobody watched")

    def record(self, stream_s: float) -> dict[str, Any]:
        """What a state says of it at a commit."""
        self.chronicle.committed_at = self._now()
        if not self.chronicle.anchors:
            self.chronicle.anchor(stream_s, self._now())
        return {
            **self.info.to_dict(),
            "fingerprint": self.chronicle.stream,
            "live": self.chronicle.to_dict(),
        }

    def steps(
        self, fps: float, frames_per_step: int, segment: Segment, stream_s: float, should_stop: Callable[[], bool]
    ) -> Iterator[Step | SourceLost | SourceRecovered | FramesDropped | None]:
        """Steps in stream time counted from the beginning of the segment, news, and None while nothing comes.

        Args:
            fps: samples a second.
            frames_per_step: samples that make a step.
            segment: the part of the stream that this source fills.
            stream_s: where the stream stands.
            should_stop: asked often.

        Raises:
            SourceError: the source has been lost for too long, or nothing can be read from it.
        """
        chronicle, options = self.chronicle, self.options
        elapsed_s: float | None = None
        if chronicle.anchors:
            since_stream_s, since_s = chronicle.anchors[-1]
            elapsed_s = max(0.0, self._now() - since_s + since_stream_s - segment.start_s)
        feed = self._feed = Feed(
            self._open,
            fps=fps,
            from_s=stream_s - segment.start_s,
            elapsed_s=elapsed_s,
            wait=self._wait,
            stall_s=options.lost_after_s(self.info.kind),
            give_up_s=float("inf") if options.give_up_s is None else options.give_up_s,
            retry_s=options.retry_s,
            once=self.info.kind == PIPE,
            listens=self._listens,
            clock=self._clock,
            now=self._now,
        )
        feed.start()
        rates = Rates(self._clock)
        dropped, damaged = chronicle.frames_dropped, chronicle.frames_damaged
        pairs = Grouping(fps, frames_per_step)
        away_s: float | None = None
        while not should_stop():
            news = feed.mailbox.get(ASK_S)
            chronicle.frames_dropped = dropped + feed.mailbox.dropped
            chronicle.frames_damaged = damaged + feed.damaged
            if isinstance(news, Sampled):
                if news.silent_s > GAP_S:
                    yield from pairs.cut()
                    since_s = segment.start_s + news.slot / fps
                    chronicle.lose(since_s - news.silent_s, "no frames came")
                    chronicle.find(since_s)
                yield from pairs.take(news)
                if slow := rates.took(feed.mailbox.dropped):
                    yield slow
            elif isinstance(news, Connected):
                begins_s = segment.start_s + news.stream_s
                chronicle.anchor(begins_s, news.real_s)
                # Frames keep the size of the first ones for the life of the stream.
                width, height = self.info.width or news.info.width, self.info.height or news.info.height
                self.info = replace(news.info, width=width, height=height)
                rates.reset(feed.mailbox.dropped)
                if gap := chronicle.find(begins_s):
                    yield SourceRecovered(self.info.name, begins_s, begins_s - gap.from_s)
                elif away_s is not None:
                    # The stream begins now, so what was waited for is no gap in it.
                    yield SourceRecovered(self.info.name, begins_s, self._clock() - away_s)
                away_s = None
            elif isinstance(news, Gone):
                yield from pairs.cut()
                if news.ended:
                    if news.error is not None:
                        raise news.error
                    return
                if chronicle.anchors:
                    chronicle.lose(segment.start_s + news.stream_s, news.why)
                if away_s is None:
                    away_s = self._clock()
                    yield SourceLost(self.info.name, segment.start_s + news.stream_s, news.why)
            else:
                yield None

    def _open(self, should_stop: Callable[[], bool]) -> Source:
        opened, self._opened = self._opened, None
        if opened is not None:
            return opened
        return self._connect(should_stop, (self.info.width, self.info.height) if self.info.width else None)


class Grouping:
    """Sampled frames to steps. A step that a loss cuts short is filled with its last frame."""

    def __init__(self, fps: float, frames_per_step: int) -> None:
        """So many frames make a step."""
        self._fps, self._n = fps, frames_per_step
        self._group: list[Sample] = []
        self._index = self._next_slot = 0

    def take(self, news: Sampled) -> Iterator[Step]:
        """Another frame; perhaps the last of a step."""
        if not self._group:
            if news.slot < self._next_slot:
                return  # the step before was filled, and reaches beyond this frame
            self._next_slot = news.slot + self._n
        self._group.append(Sample(news.slot / self._fps, news.image, news.decoder))
        if len(self._group) == self._n:
            yield from self._step()

    def cut(self) -> Iterator[Step]:
        """What follows is not connected with what was: the step that was begun ends."""
        if self._group:
            yield from self._step()

    def _step(self) -> Iterator[Step]:
        group, self._group = self._group, []
        yield make_step(self._index, group, self._n)
        self._index += 1


# Where the process that reads a source is to notice itself that nothing comes, it has this long to say so.
GRACE_S = 10.0

OPENER = "protokv.video.stream:open_stream"


def open_input(
    source: str | os.PathLike[str], options: LiveOptions, max_pixels: int | None
) -> Source | LiveSource | None:
    """The source as it is read as a stream; None: it is a file.

    Raises:
        SourceError: it is not there, or not one frame of it can be read.
    """
    text = os.fspath(source)
    kind = address.kind_of(text)
    if kind not in SOURCES or (kind == "file" and not options.follow):
        return None
    connect = partial(_connect, text, options, max_pixels)
    if kind in ("file", "http", "https"):
        try:
            opened = connect()
        except SourceError:
            # A playlist may be there later; anything else is a video on a server, which is there or not.
            if ".m3u8" not in text:
                raise
            return LiveSource(text, options, connect)
        if opened.info.seekable:
            return opened
        return LiveSource(text, options, connect, opened)
    return LiveSource(text, options, connect)


def _connect(
    text: str,
    options: LiveOptions,
    max_pixels: int | None,
    should_stop: Callable[[], bool] = lambda: False,
    size: tuple[int, int] | None = None,
) -> Source:
    stall_s = options.lost_after_s(address.kind_of(text))
    return IsolatedSource(
        text,
        opener=OPENER,
        stall_s=stall_s + GRACE_S,
        should_stop=should_stop,
        max_pixels=max_pixels,
        options=dict(options.input),
        timeout_s=min(stall_s, 1e6),
        size=size,
        follow=options.follow,
    )
