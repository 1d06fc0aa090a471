"""The thread that reads a live source: it connects, samples frames, finds out that the source is lost, and comes back.

Every connection's times begin at 0; here they become stream times that never run back, at multiples of the sampling
interval and each at most once: what comes first of an interval is what is sampled. Between two connections stream
time goes on with real time. Owns the order of these things; knows no models, states or steps.

A bounded queue between the thread that reads a source and the session that watches it.

What is full either makes the reader wait, or loses its oldest item: so a camera is never blocked, and what is watched
is the newest there is. News of the source itself is never lost. Knows nothing of video.

How long to wait before the next attempt: twice as long each time, up to a limit, and never quite the same.

Full jitter over the upper half, so that many readers of one camera do not come back in step (Brooker, "Exponential
Backoff And Jitter", https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/).

`Rates`: finds out that the model is slower than a live source. Knows no frames.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from protokv.errors import ConfigError, ProtoKVError, SourceDenied, SourceError, SourceNotFound
from protokv.ingestion.events import FramesDropped
from protokv.video.source import Image, Source, SourceInfo

# A connection that held so long was a good one: the next pause is a short one again.
GOOD_S = 10.0

# Sampled frames that wait for the model.
ROOM = 16

# Who listened for so long has waited; what ends sooner, such as a port that is taken, would end so again at once.
LISTENED_S = 1.0

_LOST = "look at the source; --give-up says how long one that is lost is tried again"


class Sampled(NamedTuple):
    """A frame for the model: its stream time is `slot / fps`, and for `silent_s` before it nothing came."""

    slot: int
    image: Image
    decoder: str
    silent_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Connected:
    """The source gives frames, the first one at this stream time."""

    info: SourceInfo
    stream_s: float
    real_s: float


@dataclass(frozen=True, slots=True)
class Gone:
    """The source gives no more: its last interval ended at `stream_s`. It is tried again unless it `ended`."""

    stream_s: float
    why: str
    ended: bool = False
    error: ProtoKVError | None = None


News = Sampled | Connected | Gone


class Feed:
    """Frames of a live source, from a thread of its own.

    Attributes:
        mailbox: what the thread has to say.
    """

    def __init__(
        self,
        connect: Callable[[Callable[[], bool]], Source],
        *,
        fps: float,
        from_s: float,
        elapsed_s: float | None,
        wait: bool,
        stall_s: float,
        give_up_s: float,
        retry_s: tuple[float, float],
        once: bool,
        listens: bool = False,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Nothing is opened before `start`.

        Args:
            connect: opens the source, or raises SourceError; called with a function that says when to give that up.
            fps: samples a second.
            from_s: stream time at which the stream stands.
            elapsed_s: how much real time has passed since the stream began; None where it begins with the first frame.
            wait: let the source wait for the model, instead of dropping the oldest frames.
            stall_s: a source without a frame for so long is lost.
            give_up_s: a source that has been lost for so long has ended.
            retry_s: the first and the longest pause before the next attempt.
            once: the source ends where its connection does.
            listens: connecting is to wait for whoever publishes, so there is no pause before the next attempt.
            clock: seconds that only go forward.
            now: seconds since 1970.
        """
        self.mailbox: Mailbox[News] = Mailbox(ROOM, wait=wait)
        self._connect, self._fps = connect, fps
        self._next_slot = math.ceil(from_s * fps - 1e-6)
        # Whether the source gave frames, to this run or to an earlier one.
        self._ever = from_s > 0
        self._stall_s, self._give_up_s, self._once, self._listens = stall_s, give_up_s, once, listens
        self._backoff = Backoff(*retry_s)
        self._clock, self._now = clock, now
        self._began_s = None if elapsed_s is None else clock() - elapsed_s
        self._damaged_before = self._damaged_now = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="protokv-feed", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def close(self) -> None:
        """End the thread, whatever it waits for."""
        self._stop.set()
        self.mailbox.close()
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def damaged(self) -> int:
        """Frames that could not be decoded, or are damaged."""
        return self._damaged_before + self._damaged_now

    def _run(self) -> None:
        lost_s: float | None = None
        while not self._stop.is_set():
            since_s = self._clock()
            frames, why, error = self._read()
            self._damaged_before, self._damaged_now = self.damaged, 0
            if self._stop.is_set():
                return
            now_s = self._clock()
            if frames:
                self._ever = True
                lost_s = None
            waited = self._listens and (frames > 0 or now_s - since_s >= LISTENED_S)
            if waited or (frames and now_s - since_s >= GOOD_S):
                self._backoff.reset()
            end_s = self._next_slot / self._fps
            lost_s = now_s if lost_s is None else lost_s
            pause_s = 0.0 if waited else self._backoff.next_s()
            # What is wrong with the address itself is not waited for; cameras lock out who tries a password on and on.
            hopeless = not self._ever and isinstance(error, (ConfigError, SourceDenied, SourceNotFound))
            if hopeless or self._once or now_s + pause_s - lost_s >= self._give_up_s:
                over = self._once and error is None and frames > 0
                self.mailbox.tell(
                    Gone(
                        end_s,
                        why,
                        ended=True,
                        error=None if over else error or SourceError(f"the source is lost: {why}", hint=_LOST),
                    )
                )
                return
            self.mailbox.tell(Gone(end_s, why))
            self._stop.wait(pause_s)

    def _read(self) -> tuple[int, str, ProtoKVError | None]:
        """One connection to its end: how many frames were sampled, why it ended, the error that it ended in."""
        heard_s, frames, offset_s = self._clock(), 0, 0.0

        def stalled() -> bool:
            return self._clock() - heard_s > self._stall_s

        def stop() -> bool:
            return self._stop.is_set() or stalled()

        try:
            with self._connect(stop) as source:
                heard_s = self._clock()
                for frame in source.frames(fps=self._fps, should_stop=stop):
                    heard_s = self._clock()
                    if not frames:
                        if self._began_s is None:
                            self._began_s = heard_s - frame.time_s
                        elapsed_s = heard_s - frame.time_s - self._began_s
                        slot = max(self._next_slot, math.ceil(elapsed_s * self._fps - 1e-6))
                        offset_s = slot / self._fps
                        self.mailbox.tell(Connected(source.info, offset_s, self._now()))
                    slot = math.floor((offset_s + frame.time_s) * self._fps + 1e-6)
                    if slot < self._next_slot:
                        continue
                    silent_s = (slot - self._next_slot) / self._fps if frames else 0.0
                    frames, self._next_slot = frames + 1, slot + 1
                    self._damaged_now = source.damage.frames_lost + source.damage.frames_damaged
                    self.mailbox.put(Sampled(slot, frame.image, frame.decoder, silent_s))
                    if self._stop.is_set():
                        break
                    # It may have been made to wait, which is not the source's fault.
                    heard_s = self._clock()
                why = source.damage.message
        except ProtoKVError as error:
            if stalled() and not self._stop.is_set():
                return frames, self._silence, None
            return frames, error.message, error
        return frames, self._silence if stalled() else why or "the source ended", None

    @property
    def _silence(self) -> str:
        return f"no frame for {self._stall_s:g} s"


T = TypeVar("T")


class Mailbox(Generic[T]):
    """Items in order, at most `room` of them that may be lost.

    Attributes:
        dropped: items that were lost so far.
    """

    def __init__(self, room: int, *, wait: bool) -> None:
        """Empty.

        Args:
            room: how many items fit.
            wait: whether `put` waits while it is full, instead of dropping the oldest.
        """
        self._room, self._wait = room, wait
        self._items: deque[tuple[T, bool]] = deque()
        self._changed = threading.Condition()
        self._held = 0
        self._closed = False
        self.dropped = 0

    def put(self, item: T) -> None:
        """Add an item that may be lost. Once the mailbox is closed, it is."""
        with self._changed:
            if self._wait:
                self._changed.wait_for(lambda: self._held < self._room or self._closed)
            if self._closed:
                return
            if self._held == self._room:
                oldest = next(i for i, (_, losable) in enumerate(self._items) if losable)
                del self._items[oldest]
                self._held -= 1
                self.dropped += 1
            self._items.append((item, True))
            self._held += 1
            self._changed.notify_all()

    def tell(self, item: T) -> None:
        """Add an item that must arrive."""
        with self._changed:
            self._items.append((item, False))
            self._changed.notify_all()

    def get(self, timeout_s: float) -> T | None:
        """The oldest item; None where none came in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._items, timeout_s):
                return None
            item, losable = self._items.popleft()
            self._held -= losable
            self._changed.notify_all()
            return item

    def __len__(self) -> int:
        """Items that wait."""
        return len(self._items)

    def close(self) -> None:
        """Nobody will take anything any more: whoever waits to put something goes on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Backoff:
    """Pauses in seconds."""

    def __init__(self, first_s: float, longest_s: float, draw: Callable[[], float] = random.random) -> None:
        """The next pause is the first one."""
        self._first_s, self._longest_s, self._draw = first_s, longest_s, draw
        self._next_s = first_s

    def reset(self) -> None:
        """It went well: the next pause is the first one again."""
        self._next_s = self._first_s

    def next_s(self) -> float:
        """How long to wait now."""
        pause_s = self._next_s
        self._next_s = min(2 * pause_s, self._longest_s)
        return pause_s * (0.5 + 0.5 * self._draw())


# Frames dropped before the two rates are told: enough to be no hiccup.
MANY = 8


class Rates:
    """How fast frames come and how fast they are watched, since the connection; told once."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Nothing has come."""
        self._clock, self._told = clock, False
        self.reset(0)

    def reset(self, dropped: int) -> None:
        """A connection begins, when so many frames were dropped in all."""
        self._since_s, self._taken, self._dropped = self._clock(), 0, dropped

    def took(self, dropped: int) -> FramesDropped | None:
        """Another frame is watched, and so many were dropped in all."""
        self._taken += 1
        lost, passed_s = dropped - self._dropped, self._clock() - self._since_s
        if self._told or lost < MANY or passed_s <= 0:
            return None
        self._told = True
        return FramesDropped((self._taken + lost) / passed_s, self._taken / passed_s)
