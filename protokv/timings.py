"""Where the time of a run goes: seconds by stage. Knows no stage by name, and no model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext


class Timings:
    """Seconds of the clock on the wall by stage, in the order in which stages were first entered.

    Each stage belongs to one thread. Stages that overlap add up to more than the run took.

    Attributes:
        seconds: by stage.
        synchronise: called where a stage ends, to wait for a device that works on its own; None: nothing to wait for.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.synchronise: Callable[[], None] | None = None

    def add(self, name: str, seconds: float) -> None:
        """What was measured elsewhere."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """What happens inside belongs to this stage, whether it ends well or not."""
        self.seconds.setdefault(name, 0.0)
        began = time.perf_counter()
        try:
            yield
        finally:
            if self.synchronise is not None:
                self.synchronise()
            self.seconds[name] += time.perf_counter() - began


def stage(timings: Timings | None, name: str) -> AbstractContextManager[None]:
    """A stage where time is taken; else nothing, at no cost."""
    return nullcontext() if timings is None else timings.stage(name)
