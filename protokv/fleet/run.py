"""Run a fleet: hand videos to workers as they become free, and return one `Outcome` per video.

A thread per worker waits for it, so workers may be processes of this machine, actors of a cluster or stubs. A worker
that dies is replaced; its video is tried once more and then fails. A mistake that concerns all videos (no such model,
a worker that dies while it loads the model) ends the fleet. A state depends on its video and the recipe alone, not on
the worker. Several fleets may share a place: a video that another fleet has locked is tried again after all others.
"""

from __future__ import annotations

import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Protocol

from protokv.errors import ModelError, ProtoKVError
from protokv.fleet.plan import Job, target_of
from protokv.fleet.records import Failure, InWork, Looked, Outcome, Verdict

# A video may take its worker with it this often before it fails.
ATTEMPTS = 2

# Seconds between two questions whether to stop.
ASK_S = 0.2

_DIED_HINT = "try it alone, with --debug; if memory ran out, use fewer --workers"


class WorkerDied(Exception):
    """The worker is gone, and with it the call; the message says why."""

    def __init__(self, message: str, *, innocent: bool = False) -> None:
        """Set `innocent` if the video is not to blame, such as for a machine that was taken away."""
        super().__init__(message)
        self.innocent = innocent


class Slot(Protocol):
    """A place for one worker (`protokv.fleet.worker`)."""

    def call(self, verb: str, *args: Any) -> Any:
        """Call a method of the worker and wait for it; start a worker if there is none. WorkerDied if it dies."""

    def standing(self) -> Sequence[tuple[float, float]]:
        """Return seconds of stream watched and left (NaN: unknown) of each video of the call; empty if unknown."""

    def close(self) -> None:
        """End the worker."""


class Pool(Protocol):
    """A number of workers."""

    @property
    def size(self) -> int:
        """The number of slots."""

    def open(self, index: int) -> Slot:
        """Return the slot of an index below `size`."""

    def stop(self) -> None:
        """Let every worker commit and return after its step."""


def run_fleet(
    jobs: Iterable[Job],
    pool: Pool,
    place: str,
    *,
    batch: int = 1,
    max_failures: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    follow: Callable[[list[InWork]], None] = lambda in_work: None,
) -> Generator[Outcome, None, None]:
    """Bring every video to its state; yield one outcome per video, in the order in which they end.

    Args:
        jobs: the videos; taken one by one as workers become free.
        pool: of workers; all that were started are ended.
        place: of the states, for the outcomes of videos whose worker died.
        batch: streams that a worker watches at a time and whose steps share forwards of its model. Their states equal
            those of single runs up to the order of sums in the model's kernels.
        max_failures: after this many failed videos no other is begun.
        should_stop: asked five times a second; once it returns True, videos in work are committed and no other is
            begun.
        follow: called five times a second with the videos in work.

    Raises:
        ModelError, ConfigError: the model cannot be loaded; other videos in work are committed first.
    """
    yield from _Run(iter(jobs), pool, place, batch, max_failures, should_stop, follow).events(_Run.ingest)


def look_fleet(
    jobs: Iterable[Job], pool: Pool, place: str, *, should_stop: Callable[[], bool] = lambda: False
) -> Generator[Looked, None, None]:
    """Yield the plan of `run_fleet` without carrying it out. Raises as it does, if the model cannot be identified."""
    yield from _Run(iter(jobs), pool, place, should_stop=should_stop).events(_Run.look)


@dataclass(eq=False)
class _Run:
    """Jobs on one side, events on the other, and a thread per worker between them."""

    jobs: Iterator[Job]
    pool: Pool
    place: str
    batch: int = 1
    max_failures: int | None = None
    should_stop: Callable[[], bool] = lambda: False
    follow: Callable[[list[InWork]], None] = lambda in_work: None
    # Guards the jobs and the counts.
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _failed: int = 0
    _postponed: deque[Job] = field(default_factory=deque)
    _seen_locked: set[str] = field(default_factory=set)
    _events: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    _over: threading.Event = field(default_factory=threading.Event)
    _fatal: BaseException | None = None
    # The worker and the videos of each thread that is at work.
    _in_work: dict[int, tuple[Slot, list[Job]]] = field(default_factory=dict)

    def events(self, act: Callable[[_Run, Slot, list[Job]], Iterator[Any]]) -> Iterator[Any]:
        """Yield the events of `act` for all jobs."""
        stopped = False
        with ThreadPoolExecutor(self.pool.size, "fleet") as threads:
            running = [threads.submit(self._serve, i, act) for i in range(self.pool.size)]
            try:
                while True:
                    ended = all(one.done() for one in running)
                    try:
                        yield self._events.get(timeout=0 if ended else ASK_S)
                    except queue.Empty:
                        if ended:
                            break
                    self.follow(self._find_in_work())
                    if not stopped and self.should_stop():
                        stopped = True
                        self._stop()
            finally:
                self._stop()
        if self._fatal is not None:
            raise self._fatal

    def _serve(self, index: int, act: Callable[[_Run, Slot, list[Job]], Iterator[Any]]) -> None:
        """Keep one worker busy; runs in its thread."""
        slot = self.pool.open(index)
        try:
            while jobs := self._next_jobs():
                for event in act(self, slot, jobs):
                    if not self._postpone(event.job, event.failure):
                        self._count(event.status)
                        self._events.put(event)
        except BaseException as error:
            if not isinstance(self._fatal, ProtoKVError):
                self._fatal = error
            self._stop()
        finally:
            slot.close()

    def _find_in_work(self) -> list[InWork]:
        with self._lock:
            slots = list(self._in_work.values())
        return [
            InWork(job, watched_s, None if math.isnan(left_s) else left_s)
            for slot, jobs in slots
            for job, (watched_s, left_s) in zip(jobs, slot.standing(), strict=False)
            if watched_s
        ]

    def look(self, slot: Slot, jobs: list[Job]) -> Iterator[Looked]:
        """Look at one video, and at the header of one that is to be watched."""
        (job,) = jobs
        state = target_of(self.place, job.key)
        try:
            found = slot.call("look", job)
            facts = None if isinstance(found, Failure) or found.standing == "done" else slot.call("probe", job)
        except WorkerDied as death:
            found = facts = Failure("WorkerDied", str(death), _DIED_HINT)
        failure = found if isinstance(found, Failure) else facts if isinstance(facts, Failure) else None
        yield Looked(job, state, found, None, facts) if failure is None else Looked(job, state, None, failure)

    def ingest(self, slot: Slot, jobs: list[Job]) -> Iterator[Outcome]:
        """Bring some videos to their states: together, and one by one if that kills the worker."""
        left, attempt = dict.fromkeys(jobs), 1
        if len(jobs) > 1:
            try:
                for outcome in self._ingest_together(slot, jobs):
                    del left[outcome.job]
                    yield outcome
            except WorkerDied as death:
                attempt += not death.innocent
        for job in left:
            yield self._ingest_with_retry(slot, job, attempt)

    def _ingest_together(self, slot: Slot, jobs: list[Job]) -> Iterator[Outcome]:
        ready = []
        for job in jobs:
            found = self._look(slot, job)
            if isinstance(found, Outcome):
                yield found
            else:
                ready.append((job, found))
        if len(ready) > 1:
            self._load(slot)
            with self._at_work(slot, [job for job, _ in ready]):
                found = slot.call("watch_together", ready)
            yield from found

    def _ingest_with_retry(self, slot: Slot, job: Job, attempt: int) -> Outcome:
        while True:
            try:
                found = self._look(slot, job)
                if not isinstance(found, Outcome):
                    self._load(slot)
                    with self._at_work(slot, [job]):
                        found = slot.call("watch", job, found)
                return replace(found, attempts=attempt)
            except WorkerDied as death:
                state = target_of(self.place, job.key)
                if self._over.is_set():
                    return Outcome(job, state, "stopped", attempts=attempt)
                if attempt == ATTEMPTS and not death.innocent:
                    failure = Failure("WorkerDied", f"{death}, {attempt} times", _DIED_HINT)
                    return Outcome(job, state, "failed", attempts=attempt, failure=failure)
                attempt += not death.innocent

    def _look(self, slot: Slot, job: Job) -> Outcome | Verdict:
        """Return the work left for a video, or its outcome if it is done or failed."""
        state, found = target_of(self.place, job.key), slot.call("look", job)
        if isinstance(found, Failure):
            return Outcome(job, state, "failed", failure=found)
        verdict: Verdict = found
        if verdict.standing != "done":
            return verdict
        return Outcome(
            job,
            state,
            "done",
            "done",
            steps=verdict.steps,
            stream_time_s=verdict.stream_time_s,
            file_bytes=verdict.file_bytes,
            failure=Failure("Damaged", verdict.damage) if verdict.damage else None,
        )

    def _load(self, slot: Slot) -> None:
        try:
            slot.call("load")
        except WorkerDied as death:
            if death.innocent or self._over.is_set():
                raise
            raise ModelError(
                f"a worker died while it loaded the model: {death}",
                hint="use fewer --workers, or a smaller model; on one device of its own each: --devices 0,1",
            ) from death

    @contextmanager
    def _at_work(self, slot: Slot, jobs: list[Job]) -> Iterator[None]:
        """Count videos as in work."""
        with self._lock:
            self._in_work[id(slot)] = slot, jobs
        try:
            yield
        finally:
            with self._lock:
                del self._in_work[id(slot)]

    def _next_jobs(self) -> list[Job]:
        """Return as many jobs as a worker takes at a time; none at the end."""
        with self._lock:
            if self._over.is_set():
                return []
            taken = list(islice(self.jobs, self.batch))
            return taken or ([self._postponed.popleft()] if self._postponed else [])

    def _count(self, status: str) -> None:
        with self._lock:
            self._failed += status == "failed"
            if self.max_failures is not None and self._failed >= self.max_failures:
                self._over.set()

    def _postpone(self, job: Job, failure: Failure | None) -> bool:
        """Put a locked video behind all others, once: another fleet may have finished it by then."""
        if failure is None or failure.kind != "StateLocked":
            return False
        with self._lock:
            if self._over.is_set() or job.key in self._seen_locked:
                return False
            self._seen_locked.add(job.key)
            self._postponed.append(job)
            return True

    def _stop(self) -> None:
        self._over.set()
        self.pool.stop()
