"""A bounded queue between the thread that reads a live source and the session that watches it.

A full mailbox makes the reader wait or drops its oldest frame, so a camera is never blocked and the session watches the
newest frames. News of the source itself is never dropped. Knows nothing of video.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Items in order, at most `room` of them that may be dropped.

    Attributes:
        dropped: how many items were dropped so far.
    """

    def __init__(self, room: int, *, wait: bool) -> None:
        """Begin empty.

        Args:
            room: how many items fit.
            wait: let `put` wait while the mailbox is full, instead of dropping the oldest item.
        """
        self._room, self._wait = room, wait
        self._items: deque[tuple[T, bool]] = deque()
        self._changed = threading.Condition()
        self._held = 0
        self._closed = False
        self.dropped = 0

    def put(self, item: T) -> None:
        """Add an item that may be dropped; a closed mailbox drops it."""
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
        """Return the oldest item; None if none came in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._items, timeout_s):
                return None
            item, losable = self._items.popleft()
            self._held -= losable
            self._changed.notify_all()
            return item

    def __len__(self) -> int:
        """Return the number of waiting items."""
        return len(self._items)

    def close(self) -> None:
        """Take no more items; a waiting `put` returns."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
