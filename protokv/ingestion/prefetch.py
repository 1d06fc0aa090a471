"""Prefetch the next steps of a source: a thread reads and prepares them while the model works on the last ones.

The thread runs `read_steps` and the backbone's `prepare` in the usual order; a queue bounds how far it is
ahead. An error of the thread is raised where its step would have come. Knows no sessions and no states.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

from protokv.backbones.base import Backbone, PreparedStep
from protokv.timings import Timings, stage
from protokv.video import Damage
from protokv.video.sampling import Step

# Steps that wait to be taken. Two even out frames that take longer; more only hold memory.
DEPTH = 2

# After this many seconds, a waiting caller is asked again whether to stop, and a waiting thread asks whether to go on.
ASK_S = 0.1


@dataclass(frozen=True, slots=True)
class ReadyStep:
    """A step without its pictures; the rest as in `Step`."""

    time_s: float
    prepared: PreparedStep
    decoders: tuple[str, ...]
    damage: Damage
    mark: int


class Stop:
    """A request to stop: the caller is asked in its own thread only, and a Yes is remembered for all threads."""

    def __init__(self, should_stop: Callable[[], bool]) -> None:
        self._should_stop = should_stop
        self.decided = False

    def ask(self) -> bool:
        """Ask the caller, unless it has said Yes before."""
        self.decided = self.decided or self._should_stop()
        return self.decided


def prefetch(
    open_steps: Callable[[Callable[[], bool]], Iterator[Step]],
    backbone: Backbone,
    stop: Stop,
    *,
    depth: int = DEPTH,
    timings: Timings | None = None,
) -> Generator[ReadyStep, None, None]:
    """Give the steps of a source in order, until it ends or soon after the caller wants to stop.

    Args:
        open_steps: begins reading, given a function that tells whether to stop; called and iterated in the thread.
        backbone: prepares frames, in the thread.
        stop: asked while waiting; waiting steps are dropped then.
        depth: the most steps that wait to be taken.
        timings: adds up "decode" and "preprocess" of the thread, and "wait for frames" of the caller.
    """
    ready: queue.Queue[ReadyStep | BaseException | None] = queue.Queue(depth)
    left = threading.Event()

    def unwanted() -> bool:
        return left.is_set() or stop.decided

    def put(item: ReadyStep | BaseException | None) -> None:
        while not unwanted():
            with contextlib.suppress(queue.Full):
                ready.put(item, timeout=ASK_S)
                return

    def work() -> None:
        try:
            steps = open_steps(unwanted)
            while True:
                with stage(timings, "decode"):
                    step = next(steps, None)
                if step is None:
                    break
                with stage(timings, "preprocess"):
                    prepared = backbone.prepare(step.images)
                put(ReadyStep(step.time_s, prepared, step.decoders, step.damage, step.mark))
                if unwanted():
                    break
            put(None)
        except BaseException as error:
            put(error)

    thread = threading.Thread(target=work, name="protokv-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            with stage(timings, "wait for frames"):
                item = _take(ready, stop)
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        left.set()
        thread.join()


def _take(ready: queue.Queue[ReadyStep | BaseException | None], stop: Stop) -> ReadyStep | BaseException | None:
    while not stop.ask():
        with contextlib.suppress(queue.Empty):
            return ready.get(timeout=ASK_S)
    return None
