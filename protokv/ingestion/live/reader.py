"""The thread that reads a live source: it connects, samples frames, notices a loss, and connects again.

The times of every connection begin at 0. Here they become stream times, at multiples of the sampling interval, each at
most once and never back: the first frame of an interval is sampled. Between two connections, stream time goes on with
real time. Knows no models, states or steps.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from protokv.errors import ConfigError, ProtoKVError, SourceDenied, SourceError, SourceNotFound
from protokv.ingestion.options import LiveOptions
from protokv.video.address import PIPE, source_kind, waits_for_publisher
from protokv.video.source import Image, Line, Source, SourceInfo, TextTrack

# A thread that has to end is waited for this long, in seconds.
LEAVE_S = 2.0

# After a connection that held this long, the next pause is a short one again.
GOOD_S = 10.0

# Sampled frames that wait for the model; lines of text, of which the oldest go.
ROOM, ROOM_OF_LINES = 16, 100

# Listening that ends sooner failed, for instance because the port is taken; it needs a pause before the next attempt.
LISTENED_S = 1.0

_LOST = "look at the source; --give-up says how long one that is lost is tried again"


class SampledFrame(NamedTuple):
    """A frame for the model: its stream time is `slot / fps`, and nothing came for `silent_s` before it."""

    slot: int
    image: Image
    decoder: str
    silent_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Connection:
    """The source gives frames, the first one at this stream time."""

    info: SourceInfo
    stream_s: float
    real_s: float
    texts: tuple[TextTrack, ...] = ()


@dataclass(frozen=True, slots=True)
class ConnectionEnd:
    """The source gives no more: its last interval ended at `stream_s`. It is tried again unless it `ended`."""

    stream_s: float
    why: str
    ended: bool = False
    error: ProtoKVError | None = None


FeedEvent = SampledFrame | Connection | ConnectionEnd


class Feed:
    """Frames of a live source, from a thread of its own.

    Attributes:
        mailbox: the thread's frames and news.
        lines: of its text tracks that came, each with the number of its track, in stream time.
    """

    def __init__(
        self,
        connect: Callable[[Callable[[], bool]], Source],
        text: str,
        options: LiveOptions,
        *,
        fps: float,
        from_s: float,
        elapsed_s: float | None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Prepare; nothing is opened before `start`.

        Args:
            connect: opens the source, or raises SourceError; it is given a function that says when to stop trying.
            text: the address.
            options: how the source is read.
            fps: samples a second.
            from_s: stream time to go on at.
            elapsed_s: real time since the stream began; None: it begins with the first frame.
            clock: seconds that only go forward.
            now: seconds since 1970.
        """
        kind = source_kind(text)
        self.mailbox = Mailbox(ROOM, wait=options.waits(kind))
        self.lines: deque[tuple[int, Line]] = deque(maxlen=ROOM_OF_LINES)
        self._connect, self._fps = connect, fps
        self._next_slot = math.ceil(from_s * fps - 1e-6)
        # Whether the source gave frames, to this run or to an earlier one.
        self._ever = from_s > 0
        self._stall_s, self._once = options.lost_after_s(kind), kind == PIPE
        # Connecting waits for a publisher, so there is no pause before the next attempt.
        self._listens = waits_for_publisher(text, options.input)
        self._waits = options.give_up_s is not None
        self._give_up_s = math.inf if options.give_up_s is None else options.give_up_s
        self._retry_s = options.retry_s
        self._clock, self._now = clock, now
        self._began_s = None if elapsed_s is None else clock() - elapsed_s
        self._damaged_before = self._damaged_now = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="protokv-feed", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def close(self) -> None:
        """End the thread, even while it waits."""
        self._stop.set()
        self.mailbox.close()
        if self._thread.ident is not None:
            # FFmpeg may wait for the network longer than this; the thread then ends by itself.
            self._thread.join(LEAVE_S)

    @property
    def frames_damaged(self) -> int:
        """Number of frames that could not be decoded, or are damaged."""
        return self._damaged_before + self._damaged_now

    def _run(self) -> None:
        lost_s: float | None = None
        pauses = backoff(*self._retry_s)
        while not self._stop.is_set():
            since_s = self._clock()
            frames, why, error = self._read()
            self._damaged_before, self._damaged_now = self.frames_damaged, 0
            if self._stop.is_set():
                return
            now_s = self._clock()
            if frames:
                self._ever = True
                lost_s = None
            waited = self._listens and (frames > 0 or now_s - since_s >= LISTENED_S)
            if waited or (frames and now_s - since_s >= GOOD_S):
                pauses = backoff(*self._retry_s)
            end_s = self._next_slot / self._fps
            lost_s = now_s if lost_s is None else lost_s
            pause_s = 0.0 if waited else next(pauses)
            # Do not retry a wrong address, unless the user said for how long. Cameras lock out a client that tries a
            # password again and again.
            wrong = (ConfigError, SourceDenied) if self._waits else (ConfigError, SourceDenied, SourceNotFound)
            hopeless = not self._ever and isinstance(error, wrong)
            if hopeless or self._once or now_s + pause_s - lost_s >= self._give_up_s:
                if not (self._once and frames > 0):
                    error = error or SourceError(f"the source is lost: {why}", hint=_LOST)
                self.mailbox.put(ConnectionEnd(end_s, why, ended=True, error=error))
                return
            self.mailbox.put(ConnectionEnd(end_s, why))
            self._stop.wait(pause_s)

    def _read(self) -> tuple[int, str, ProtoKVError | None]:
        """Read one connection to its end; return the number of sampled frames, why it ended, and its error."""
        alive_s, frames, offset_s = self._clock(), 0, 0.0

        def stalled() -> bool:
            return self._clock() - alive_s > self._stall_s

        def stop() -> bool:
            return self._stop.is_set() or stalled()

        silence = f"no frame for {self._stall_s:g} s"
        try:
            with self._connect(stop) as source:
                alive_s = self._clock()
                for frame in source.frames(fps=self._fps, should_stop=stop):
                    alive_s = self._clock()
                    if not frames:
                        if self._began_s is None:
                            self._began_s = alive_s - frame.time_s
                        elapsed_s = alive_s - frame.time_s - self._began_s
                        slot = max(self._next_slot, math.ceil(elapsed_s * self._fps - 1e-6))
                        offset_s = slot / self._fps
                        self.mailbox.put(Connection(source.info, offset_s, self._now(), source.texts))
                    self._keep_lines(source, offset_s)
                    slot = math.floor((offset_s + frame.time_s) * self._fps + 1e-6)
                    if slot < self._next_slot:
                        continue
                    silent_s = (slot - self._next_slot) / self._fps if frames else 0.0
                    frames, self._next_slot = frames + 1, slot + 1
                    self._damaged_now = source.damage.frames_lost + source.damage.frames_damaged
                    self.mailbox.put(SampledFrame(slot, frame.image, frame.decoder, silent_s))
                    if self._stop.is_set():
                        break
                    # `put` may have waited for the model: that is no silence of the source.
                    alive_s = self._clock()
                self._keep_lines(source, offset_s)
                why = source.damage.message
        except ProtoKVError as error:
            if stalled() and not self._stop.is_set():
                return frames, silence, None
            return frames, error.message, error
        return frames, silence if stalled() else why or "the source ended", None

    def _keep_lines(self, source: Source, offset_s: float) -> None:
        self.lines.extend((number, line.shift(offset_s)) for number, line in source.new_lines())


# Its own: a thread that draws from Python's generator disturbs whoever has seeded it.
_JITTER = random.Random()


def backoff(first_s: float, longest_s: float, draw: Callable[[], float] = _JITTER.random) -> Iterator[float]:
    """Give pauses in seconds before the next attempt: each twice as long as the last, up to a limit.

    Half of a pause is drawn at random, so that many readers of one camera do not come back in step (Brooker,
    "Exponential Backoff And Jitter", https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/).
    """
    pause_s = first_s
    while True:
        yield pause_s * (0.5 + 0.5 * draw())
        pause_s = min(2 * pause_s, longest_s)


class Mailbox:
    """A bounded queue between the thread that reads a live source and the session that watches it.

    While it holds `room` frames, it makes the reader `wait` or drops the oldest one, so a camera is never blocked and
    the session watches the newest frames. Connections and their ends are never dropped.

    Attributes:
        dropped: number of frames dropped so far.
    """

    def __init__(self, room: int, *, wait: bool) -> None:
        self._room, self._wait, self._closed = room, wait, False
        self._items: deque[FeedEvent] = deque()
        self._changed = threading.Condition()
        self.dropped = 0

    def put(self, item: FeedEvent) -> None:
        """Add a frame or news; a closed mailbox takes no frame."""
        with self._changed:
            if isinstance(item, SampledFrame):
                if self._wait:
                    self._changed.wait_for(lambda: len(self._find_frames()) < self._room or self._closed)
                if self._closed:
                    return
                if len(frames := self._find_frames()) == self._room:
                    del self._items[frames[0]]
                    self.dropped += 1
            self._items.append(item)
            self._changed.notify_all()

    def get(self, timeout_s: float) -> FeedEvent | None:
        """Return the oldest item; None if none came in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._items, timeout_s):
                return None
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def __len__(self) -> int:
        """Return the number of waiting items."""
        return len(self._items)

    def close(self) -> None:
        """Take no more frames; a waiting `put` returns."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _find_frames(self) -> list[int]:
        return [n for n, one in enumerate(self._items) if isinstance(one, SampledFrame)]
