"""Prefetch the next steps of a source: threads read and prepare them while the model works on the
last ones.

One thread runs `read_steps`, another one the backbone's `prepare`, in the usual order, a bounded
number of steps ahead. An error of theirs is raised where its step would have come. Knows no
sessions and no states.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from protokv.core.backbone import Backbone, PreparedStep
from protokv.timings import Timings, time_stage
from protokv.video import SourceDamage
from protokv.video.sampling import VideoStep
from protokv.video.source import Image, ShouldStop, never_stop

# Steps that wait to be taken. A keyframe takes as long as several other frames; more only hold
# memory.
PREFETCH_DEPTH = 4

# After this many seconds, a waiting caller is asked again whether to stop.
STOP_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class PrefetchedStep:
    """A step without its pictures, but a small one if it is wanted; the rest as in `VideoStep`."""

    time_s: float
    prepared: PreparedStep
    thumbnail: Image | None
    decoders: tuple[str, ...]
    damage: SourceDamage
    mark: int


class StopRequest:
    """Whether a run is to stop: the caller is asked in its own thread only, and a Yes is `decided`
    for all threads.

    `is_over` says that it has reached its end.
    """

    def __init__(self, should_stop: ShouldStop, reaches_end: ShouldStop = never_stop) -> None:
        self._should_stop = should_stop
        self._reaches_end = reaches_end
        self.decided = self.is_over = False

    def ask(self) -> bool:
        """Ask the caller, unless it has said Yes before."""
        self.is_over = self.is_over or self._reaches_end()
        self.decided = self.decided or self._should_stop() or self.is_over
        return self.decided


def prepare_step(
    step: VideoStep,
    backbone: Backbone,
    shrink: Callable[[Image], Image] | None,
    timings: Timings | None,
) -> PrefetchedStep:
    """Prepare the pictures of a step, and make its small one by `shrink`; None: it has none."""
    with time_stage(timings, "preprocess"):
        prepared = backbone.prepare(step.images).ready_for(backbone.device)
        thumbnail = None if shrink is None else shrink(step.images[0])
    return PrefetchedStep(step.time_s, prepared, thumbnail, step.decoders, step.damage, step.mark)


def prefetch_steps(
    open_steps: Callable[[ShouldStop], Iterator[VideoStep]],
    backbone: Backbone,
    stop: StopRequest,
    *,
    depth: int = PREFETCH_DEPTH,
    shrink: Callable[[Image], Image] | None = None,
    timings: Timings | None = None,
) -> Generator[PrefetchedStep, None, None]:
    """Give the steps of a source in order, until it ends or soon after the caller wants to stop.

    `open_steps` begins reading, given a function that tells whether to stop. One thread iterates
    it, and in another one `backbone` prepares frames, so that up to `depth` steps wait; they are
    dropped if `stop` says so. `shrink` makes the small picture of a step from its first one; None:
    no small pictures.
    """
    left = threading.Event()

    def unwanted() -> bool:
        return left.is_set() or stop.decided

    def read() -> VideoStep | None:
        if unwanted():
            return None
        with time_stage(timings, "decode"):
            return next(steps, None)

    def prepare(reading: Future[VideoStep | None]) -> PrefetchedStep | None:
        step = reading.result()
        return None if step is None else prepare_step(step, backbone, shrink, timings)

    steps = open_steps(unwanted)
    reader, preparer = (
        ThreadPoolExecutor(1, f"protokv-prefetch-{name}") for name in ("read", "prepare")
    )
    # One step is in the hands of a thread, the others wait.
    ahead = deque(preparer.submit(prepare, reader.submit(read)) for _ in range(depth + 1))
    try:
        while True:
            with time_stage(timings, "wait for frames"):
                while not stop.ask() and not ahead[0].done():
                    wait([ahead[0]], STOP_POLL_S)
            item = None if stop.decided else ahead.popleft().result()
            if item is None:
                return
            ahead.append(preparer.submit(prepare, reader.submit(read)))
            yield item
    finally:
        left.set()
        for pool in (reader, preparer):
            pool.shutdown(cancel_futures=True)
