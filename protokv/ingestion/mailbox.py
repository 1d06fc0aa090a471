"""What the thread that reads a live source tells the session that watches it, and the queue between
them.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

from protokv.errors import ProtoKVError
from protokv.video import SourceInfo
from protokv.video.sampling import VideoStep


class LiveConnection(NamedTuple):
    """The source gives frames: the first one at `stream_s`, `real_s` seconds after 1970 began."""

    info: SourceInfo
    stream_s: float
    real_s: float


class LiveConnectionEnd(NamedTuple):
    """The source gives no more: its last interval ended at `stream_s`. It is tried again unless it
    `ended`.
    """

    stream_s: float
    why: str
    ended: bool = False
    error: ProtoKVError | None = None


FeedItem = VideoStep | LiveConnection | LiveConnectionEnd


class LiveQueue:
    """A bounded queue between the thread that reads a live source and the session that watches it.

    While it holds `room` steps, it makes the reader `wait` or drops the oldest one, so a camera is
    never blocked and the session watches the newest steps. News are never dropped.
    """

    def __init__(self, room: int, *, wait: bool) -> None:
        self._room = room
        self._wait = wait
        self._closed = False
        self._items: deque[FeedItem] = deque()
        self._changed = threading.Condition()
        self.dropped = 0  # frames so far

    def put(self, item: FeedItem) -> None:
        """Add a step or news; a closed mailbox takes no step."""
        with self._changed:
            if isinstance(item, VideoStep):
                if self._wait:
                    self._changed.wait_for(lambda: len(self._steps()) < self._room or self._closed)
                if self._closed:
                    return
                if len(steps := self._steps()) == self._room:
                    self._items.remove(steps[0])
                    self.dropped += len(steps[0].decoders)
            self._items.append(item)
            self._changed.notify_all()

    def get(self, timeout_s: float) -> FeedItem | None:
        """Return the oldest item; None if none came in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._items, timeout_s)
            item = self._items.popleft() if self._items else None
            self._changed.notify_all()
            return item

    def close(self) -> None:
        """Take no more steps; a waiting `put` returns."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _steps(self) -> list[VideoStep]:
        return [one for one in self._items if isinstance(one, VideoStep)]
