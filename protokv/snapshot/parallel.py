"""Runs calls on a few threads and gives their results in order: hashing, copying and reading release the interpreter.

Owns how many run at a time, so that what they hold stays bounded. Knows nothing of what they do.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

# More do not help: a few cores hash as fast as memory delivers.
_MOST = 4


def threads() -> int:
    """How many threads are of use on this machine, to this process."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(_MOST, cores)


def parallel(calls: Iterable[Callable[[], T]], at_once: int | None = None) -> Iterator[T]:
    """Yield the result of every call, in order, while `at_once` of them run; where None, `threads()`.

    The calls are taken from their iterable in this thread, no sooner than needed. The first error ends it, after
    those that are under way.
    """
    n = at_once or threads()
    with ThreadPoolExecutor(n) as pool:
        waiting: deque[Future[T]] = deque()
        try:
            for call in calls:
                waiting.append(pool.submit(call))
                if len(waiting) > n:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for one in waiting:
                one.cancel()
