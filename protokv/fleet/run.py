"""Run a fleet: hand videos to workers as they become free, and yield one `Outcome` per video.

A thread per worker waits for it, so workers may be processes of this machine or actors of a cluster. A worker that dies
is replaced and its video tried again, from its last commit. A mistake that concerns all videos (no such model, a worker
that dies while it loads the model) ends the fleet. A state depends on its video and the recipe alone.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

from protokv.errors import ModelError
from protokv.fleet.plan import Job, locate_state
from protokv.fleet.worker import Failure, Outcome

# A video may take its worker with it this often before it fails: it, or a machine that is taken away, may be to blame.
ATTEMPTS = 3

# Seconds between two calls of `should_stop`.
POLL_S = 0.2


class WorkerDied(Exception):
    """The worker is gone, and with it the call; the message says why."""


class Slot(Protocol):
    """A place for one worker (`protokv.fleet.worker`)."""

    def call(self, verb: str, *args: Any) -> Any:
        """Call a method of the worker and wait for it; start a worker if there is none. WorkerDied if it dies."""

    def close(self) -> None:
        """End the worker."""


class Pool(Protocol):
    """A number of workers."""

    @property
    def size(self) -> int:
        """The number of slots."""

    @property
    def watched_s(self) -> float:
        """Seconds of stream that the workers have watched until now; 0 if they tell only when a video has ended."""

    def open(self, index: int) -> Slot:
        """Return the slot of an index below `size`."""

    def stop(self) -> None:
        """Let every worker commit and return after its step."""


def run_fleet(
    jobs: Iterable[Job],
    pool: Pool,
    place: str,
    *,
    max_failures: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[Outcome]:
    """Bring every video to its state; yield one outcome per video, in the order in which they end.

    Args:
        jobs: the videos; taken one by one as workers become free.
        pool: of workers; all that were started are ended.
        place: of the states, for the outcomes of videos whose worker died.
        max_failures: after this many failed videos no other is begun.
        should_stop: asked after every outcome and five times a second; once it returns True, videos in work are
            committed and no other is begun.

    Raises:
        ModelError, ConfigError: the model cannot be loaded; other videos in work are committed first.
    """
    run = _Run(iter(jobs), pool, place, max_failures)
    with ThreadPoolExecutor(pool.size, "fleet") as threads:
        serving = [threads.submit(run.serve, i) for i in range(pool.size)]
        try:
            while not all(one.done() for one in serving) or not run.outcomes.empty():
                with suppress(queue.Empty):
                    yield run.outcomes.get(timeout=POLL_S)
                if should_stop():
                    run.stop()
        finally:
            run.stop()
    for one in serving:
        one.result()


class _Run:
    """Jobs on one side, outcomes on the other, and a thread per worker between them."""

    def __init__(self, jobs: Iterator[Job], pool: Pool, place: str, max_failures: int | None) -> None:
        self._jobs, self._pool, self._place, self._max_failures = jobs, pool, place, max_failures
        self.outcomes = queue.SimpleQueue[Outcome]()
        self._over, self._failed = threading.Event(), 0
        # Held while the jobs and the count of failures change.
        self._lock = threading.Lock()

    def serve(self, index: int) -> None:
        """Keep one worker busy; runs in its thread."""
        slot = self._pool.open(index)
        try:
            while (job := self._next_job()) is not None:
                self._add(self._ingest(slot, job))
        except BaseException:
            self.stop()
            raise
        finally:
            slot.close()

    def stop(self) -> None:
        """Begin no other video, and let the workers commit those in work."""
        self._over.set()
        self._pool.stop()

    def _next_job(self) -> Job | None:
        with self._lock:
            return None if self._over.is_set() else next(self._jobs, None)

    def _add(self, outcome: Outcome) -> None:
        with self._lock:
            self._failed += outcome.status == "failed"
            if self._max_failures is not None and self._failed >= self._max_failures:
                self._over.set()
        self.outcomes.put(outcome)

    def _ingest(self, slot: Slot, job: Job) -> Outcome:
        """Bring one video to its state."""
        state = locate_state(self._place, job.key)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                found: Outcome = slot.call("examine", job)
                if found.status not in ("done", "failed"):
                    self._load(slot)
                    found = slot.call("watch", found)
                return replace(found, attempts=attempt)
            except WorkerDied as death:
                if self._over.is_set():
                    return Outcome(job, state, "stopped", attempts=attempt)
                message = f"{death}, {attempt} times"
        hint = "try it alone, with --debug; if memory ran out, use fewer --workers"
        return Outcome(job, state, "failed", attempts=ATTEMPTS, failure=Failure("WorkerDied", message, hint))

    def _load(self, slot: Slot) -> None:
        try:
            slot.call("load")
        except WorkerDied as death:
            if self._over.is_set():
                raise
            raise ModelError(
                f"a worker died while it loaded the model: {death}",
                hint="use fewer --workers, or a smaller model; on one device of its own each: --devices 0,1",
            ) from death
