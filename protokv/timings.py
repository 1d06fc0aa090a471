"""Seconds by stage of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext


class Timings:
    """Wall-clock seconds by stage, in the order in which stages were first entered.

    Each stage belongs to one thread. Overlapping stages add up to more than the time of the run.

    Attributes:
        seconds: by stage.
        graphs: how each part of the model's work was run: by a graph, or why not.
        synchronise: called at the end of a stage to wait for an asynchronous device; None: no wait.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.graphs: dict[str, str] = {}
        self.synchronise: Callable[[], None] | None = None

    def add(self, name: str, seconds: float) -> None:
        """Add seconds that were measured elsewhere."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the time of the block, also if it raises."""
        self.seconds.setdefault(name, 0.0)
        began = time.perf_counter()
        try:
            yield
        finally:
            if self.synchronise is not None:
                self.synchronise()
            self.seconds[name] += time.perf_counter() - began


def time_stage(timings: Timings | None, name: str) -> AbstractContextManager[None]:
    """Return a stage of `timings`, or a no-op if there are none."""
    return nullcontext() if timings is None else timings.stage(name)


@contextmanager
def share_stage(timings: Sequence[Timings], name: str) -> Iterator[None]:
    """Count the time of the block in equal parts, also if it raises."""
    began = time.perf_counter()
    try:
        yield
    finally:
        for one in timings:
            if one.synchronise is not None:
                one.synchronise()
        seconds = time.perf_counter() - began
        for one in timings:
            one.add(name, seconds / len(timings))
