"""Run a fleet: hand videos to workers as they become free, and yield one `Outcome` per video.

A thread waits for each worker, so workers may be processes of this machine or actors of a cluster. A worker that dies
is replaced and its video tried again, from its last commit. A mistake that concerns all videos (no such model, a worker
that dies while it loads the model) ends the fleet. A state depends on its video and the recipe alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from threading import Event
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


class Pool(Protocol):
    """A number of workers (`protokv.fleet.worker`), numbered from 0; a context manager that ends them.

    Attributes:
        size: how many.
        watched_s: seconds of stream that they have watched until now; 0 if they tell only when a video has ended.
    """

    size: int

    @property
    def watched_s(self) -> float: ...  # noqa: D102

    def call(self, index: int, verb: str, *args: Any) -> Any:
        """Call a method of a worker and wait for it; start the worker if there is none. WorkerDied if it dies."""

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
        pool: of workers.
        place: of the states, for the outcomes of videos whose worker died.
        max_failures: after this many failed videos no other is begun.
        should_stop: asked after every outcome and five times a second; once it returns True, videos in work are
            committed and no other is begun.

    Raises:
        ModelError, ConfigError: the model cannot be loaded; other videos in work are committed first.
    """
    waiting, failed, over = iter(jobs), 0, Event()
    free, in_work = list(range(pool.size)), dict[Future[Outcome], int]()
    with ThreadPoolExecutor(pool.size, "fleet") as threads:
        try:
            while True:
                while free and not over.is_set() and (job := next(waiting, None)) is not None:
                    index = free.pop(0)
                    in_work[threads.submit(_ingest, pool, index, job, place, over)] = index
                if not in_work:
                    return
                for ended in wait(in_work, POLL_S, FIRST_COMPLETED).done:
                    free.append(in_work.pop(ended))
                    outcome = ended.result()
                    failed += outcome.status == "failed"
                    if max_failures is not None and failed >= max_failures:
                        over.set()
                    yield outcome
                if should_stop():
                    over.set()
                    pool.stop()
        finally:
            # Left early, by an error or by the caller: what is in work is committed.
            over.set()
            if in_work:
                pool.stop()


def _ingest(pool: Pool, index: int, job: Job, place: str, over: Event) -> Outcome:
    """Bring one video to its state with the worker at `index`; once `over`, a worker that died is not replaced."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            found: Outcome = pool.call(index, "examine", job)
            if found.status not in ("done", "failed"):
                _load(pool, index, over)
                found = pool.call(index, "watch", found)
            return replace(found, attempts=attempt)
        except WorkerDied as death:
            if over.is_set():
                return Outcome(job, locate_state(place, job.key), "stopped", attempts=attempt)
            message = f"{death}, {attempt} times"
    hint = "try it alone, with --debug; if memory ran out, use fewer --workers"
    failure = Failure("WorkerDied", message, hint)
    return Outcome(job, locate_state(place, job.key), "failed", attempts=ATTEMPTS, failure=failure)


def _load(pool: Pool, index: int, over: Event) -> None:
    try:
        pool.call(index, "load")
    except WorkerDied as death:
        if over.is_set():
            raise
        raise ModelError(
            f"a worker died while it loaded the model: {death}",
            hint="use fewer --workers, or a smaller model; on one device of its own each: --devices 0,1",
        ) from death
