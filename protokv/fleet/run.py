"""Run a fleet: hand videos to workers as they become free, and yield one `VideoOutcome` per video.

A thread waits for each worker, which is a process. A worker that dies is replaced and its video
tried again, from its last commit. A mistake of all videos, such as no model, ends the fleet.
"""

from __future__ import annotations

import multiprocessing
import signal
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager
from ctypes import c_bool
from dataclasses import replace
from multiprocessing import resource_tracker
from typing import Any

from protokv.errors import ModelError
from protokv.fleet.plan import VideoJob, locate_fleet_state
from protokv.fleet.worker import FleetWorker, JobRecipe, VideoFailure, VideoOutcome
from protokv.machine import begin_pool_process, inherited
from protokv.video.source import ShouldStop, never_stop

VIDEO_ATTEMPTS = 3  # how often a video may take its worker with it before it fails
WORKER_POLL_S = 0.2  # between two calls of `should_stop`
_SPAWN = multiprocessing.get_context("spawn")


class WorkerDied(Exception):
    """The worker is gone, and with it the call; the message says why."""


class LocalWorkerPool(AbstractContextManager["LocalWorkerPool"]):
    """`size` processes on this machine, on the devices in turn; a context manager that ends them.

    The death of a process breaks its whole executor, so each worker has an executor of its own:
    only its task is lost, and it keeps its device. A worker ends with its coordinator.
    """

    def __init__(self, recipe: JobRecipe, n: int = 1, devices: Sequence[str] = ("auto",)) -> None:
        """Start nothing yet; `n` processes will use the devices, named as in `load_backbone`."""
        self.size = n
        self._recipe = recipe
        self._devices = devices
        self._executors: list[ProcessPoolExecutor | None] = [None] * n
        # Shared memory without a lock, because a worker may be killed at any instant.
        self._stopped = _SPAWN.RawValue(c_bool, False)
        # Starting this unblocks SIGINT in the thread that does it, and so in the first worker that
        # `call` starts.
        resource_tracker.ensure_running()
        # Workers copy videos from a bucket to this folder, and one that is killed leaves its copy.
        self._scratch = tempfile.TemporaryDirectory(
            prefix="protokv-fleet-", ignore_cleanup_errors=True
        )

    def call(self, index: int, verb: str, *args: Any) -> Any:
        """Call a method of a `FleetWorker` and wait for it; start it if there is none. WorkerDied
        if it dies.
        """
        # A terminal sends these signals to all processes, but only the coordinator acts. A process
        # that starts now inherits the mask of this thread, which is one of those that wait for
        # workers.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP, signal.SIGTERM})
        if (executor := self._executors[index]) is None:
            device = self._devices[index % len(self._devices)]
            executor = ProcessPoolExecutor(1, _SPAWN, begin_pool_process, (self._stopped,))
            self._executors[index] = executor
            executor.submit(_begin, self._recipe, device, self._scratch.name)
        try:
            return executor.submit(_call, verb, args).result()
        except BrokenProcessPool as error:
            self._executors[index] = None
            raise WorkerDied(
                "its process was killed or crashed (out of memory, or a fault in a library)"
            ) from error

    def stop(self) -> None:
        """Let every worker commit and return after its step."""
        self._stopped.value = True

    def __exit__(self, *_: object) -> None:
        for executor in filter(None, self._executors):
            executor.shutdown()
        self._scratch.cleanup()


_workers: list[FleetWorker] = []  # the worker of this process; none in the coordinator's


def _begin(recipe: JobRecipe, device: str, scratch: str) -> None:
    tempfile.tempdir = scratch
    stopped = inherited[0]
    _workers.append(FleetWorker(recipe, device, lambda: bool(stopped.value)))


def _call(verb: str, args: tuple[Any, ...]) -> Any:
    return getattr(_workers[0], verb)(*args)


def run_fleet(
    jobs: Iterable[VideoJob],
    pool: LocalWorkerPool,
    place: str,
    *,
    max_failures: int | None = None,
    should_stop: ShouldStop = never_stop,
) -> Iterator[VideoOutcome]:
    """Bring every video to its state at `place`; yield one outcome per video, in the order in which
    they end.

    Videos are taken as workers become free. No other is begun after `max_failures`, or once
    `should_stop`, asked five times a second, returns True: then those in work are committed.

    ModelError, ConfigError: the model cannot be loaded; other videos in work are committed first.
    """
    waiting = iter(jobs)
    failed = 0
    over = threading.Event()
    free = list(range(pool.size))
    in_work = dict[Future[VideoOutcome], int]()
    with ThreadPoolExecutor(pool.size, "fleet") as threads:
        try:
            while True:
                while free and not over.is_set() and (job := next(waiting, None)) is not None:
                    index = free.pop(0)
                    in_work[threads.submit(_ingest, pool, index, job, place, over)] = index
                if not in_work:
                    return
                for ended in wait(in_work, WORKER_POLL_S, FIRST_COMPLETED).done:
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


def _ingest(
    pool: LocalWorkerPool, index: int, job: VideoJob, place: str, over: threading.Event
) -> VideoOutcome:
    """Bring one video to its state with the worker at `index`; once `over`, a worker that died is
    not replaced.
    """
    lost = VideoOutcome(job, locate_fleet_state(place, job.key), "stopped")
    for attempt in range(1, VIDEO_ATTEMPTS + 1):
        verb = "examine"
        try:
            found: VideoOutcome = pool.call(index, verb, job)
            if found.status not in ("done", "failed"):
                pool.call(index, verb := "load")
                found = pool.call(index, verb := "watch", found)
            return replace(found, attempts=attempt)
        except WorkerDied as death:
            if over.is_set():
                return replace(lost, attempts=attempt)
            if verb == "load":
                raise ModelError(
                    f"a worker died while it loaded the model: {death}",
                    hint="use fewer --workers, or a smaller model; on one device of its own each: "
                    "--devices 0,1",
                ) from death
            message = f"{death}, {attempt} times"
    hint = "try it alone, with --debug; if memory ran out, use fewer --workers"
    return replace(
        lost,
        status="failed",
        attempts=VIDEO_ATTEMPTS,
        failure=VideoFailure("WorkerDied", message, hint),
    )
