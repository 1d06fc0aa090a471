"""A fleet at work: videos are handed to workers as these become free, and every video ends in one `Outcome`.

A thread per worker waits for it, so that the workers of a pool may be processes of this machine, actors of a cluster or
stubs alike. A worker that dies is replaced; its video is tried once more, and then it is a failure like others. What
is wrong for all videos (no such model, a worker that dies while it loads the model) ends the fleet. Which worker
takes which video decides nothing: a state depends on its video and the recipe alone. Several fleets may share a place:
a video that another one is at comes last, when it may be done.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from typing import Any, Protocol

from protokv.errors import ModelError, ProtoKVError
from protokv.fleet.outcome import Failure, Looked, Outcome, Verdict
from protokv.fleet.plan import Job, target_of

ATTEMPTS = 2
"""How often a video is begun that takes its worker with it."""

ASK_S = 0.2
"""How often the coordinator asks whether to stop."""


class WorkerDied(Exception):
    """The worker is gone, and with it what it was asked; the message says why."""

    def __init__(self, message: str, *, innocent: bool = False) -> None:
        """Args: `innocent`: nothing that the worker did is the reason, such as a machine that was taken away."""
        super().__init__(message)
        self.innocent = innocent


class Slot(Protocol):
    """A place for one worker (`protokv.fleet.worker`)."""

    def call(self, verb: str, *args: Any) -> Any:
        """Call a method of the worker and wait for it; a worker is started where there is none.

        Raises:
            WorkerDied: the next call starts another one.
        """
        ...

    def close(self) -> None:
        """End the worker."""
        ...


class Pool(Protocol):
    """So many workers."""

    @property
    def size(self) -> int:
        """How many slots there are."""
        ...

    def open(self, index: int) -> Slot:
        """The slot of a number below `size`."""
        ...

    def stop(self) -> None:
        """Let every worker commit and return after its step."""
        ...


def run_fleet(
    jobs: Iterable[Job],
    pool: Pool,
    place: str,
    *,
    batch: int = 1,
    max_failures: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Generator[Outcome, None, None]:
    """Bring every video to its state; one outcome per video, in the order in which they end.

    Args:
        jobs: what to do; taken one by one as workers become free.
        pool: who does it; every worker that was started is ended.
        place: where states go, for the outcomes of videos that no worker could say anything of.
        batch: streams that a worker watches at a time and whose steps share forwards of its model. States are then
            those of single runs up to the order of sums in the model, which kernels choose.
        max_failures: after so many videos that failed no other is begun.
        should_stop: asked five times a second; once it says yes, videos in work are committed and no other is begun.

    Raises:
        ModelError, ConfigError: the model cannot be loaded; the videos in work elsewhere are committed first.
    """
    yield from _Run(jobs, pool, place, max_failures, should_stop, batch).outcomes(_Run.ingest)


def look_fleet(jobs: Iterable[Job], pool: Pool, place: str) -> Generator[Looked, None, None]:
    """What `run_fleet` would do, without doing it. Raises as it does, where the model cannot be identified."""
    yield from _Run(jobs, pool, place, None, lambda: False, 1).outcomes(_Run.look)


class _Run:
    """Jobs on one side, events on the other, and threads between them."""

    def __init__(
        self,
        jobs: Iterable[Job],
        pool: Pool,
        place: str,
        max_failures: int | None,
        should_stop: Callable[[], bool],
        batch: int,
    ) -> None:
        self._batch = batch
        self._jobs, self._pool, self._place = iter(jobs), pool, place
        self._max_failures, self._should_stop = max_failures, should_stop
        self._taking = threading.Lock()
        self._failed = 0
        self._again: deque[Job] = deque()
        self._seen_locked: set[str] = set()
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._over = threading.Event()
        self._fatal: BaseException | None = None

    def outcomes(self, act: Callable[[_Run, Slot, list[Job]], Iterator[Any]]) -> Iterator[Any]:
        """What `act` returns for each job."""
        asked = False
        with ThreadPoolExecutor(self._pool.size, "fleet") as threads:
            running = [threads.submit(self._serve, i, act) for i in range(self._pool.size)]
            try:
                while True:
                    ended = all(one.done() for one in running)
                    try:
                        event = self._events.get(timeout=0 if ended else ASK_S)
                    except queue.Empty:
                        if ended:
                            break
                        event = None
                    if event is not None:
                        yield event
                    if not asked and (asked := self._should_stop()):
                        self._stop()
            finally:
                self._stop()
        if self._fatal is not None:
            raise self._fatal

    def ingest(self, slot: Slot, jobs: list[Job]) -> Iterator[Outcome]:
        """Bring some videos to their states: together, and where the worker dies one by one."""
        left, attempt = dict.fromkeys(jobs), 1
        if len(jobs) > 1:
            try:
                for outcome in self._together(slot, jobs):
                    del left[outcome.job]
                    yield outcome
            except WorkerDied as death:
                attempt += not death.innocent
        for job in left:
            yield self._ingest(slot, job, attempt)

    def _together(self, slot: Slot, jobs: list[Job]) -> Iterator[Outcome]:
        ready = []
        for job in jobs:
            found = self._looked(slot, job)
            if isinstance(found, Outcome):
                yield found
            else:
                ready.append((job, found))
        if len(ready) > 1:
            self._load(slot)
            yield from slot.call("watch_together", ready)

    def _ingest(self, slot: Slot, job: Job, attempt: int) -> Outcome:
        """Look, load, watch; once more where the worker dies."""
        while True:
            try:
                return replace(self._once(slot, job), attempts=attempt)
            except WorkerDied as death:
                state = target_of(self._place, job.key)
                if self._over.is_set():
                    return Outcome(job, state, "stopped", attempts=attempt)
                if attempt == ATTEMPTS and not death.innocent:
                    failure = Failure("WorkerDied", f"{death}, {attempt} times", _DIED)
                    return Outcome(job, state, "failed", attempts=attempt, failure=failure)
                attempt += not death.innocent

    def look(self, slot: Slot, jobs: list[Job]) -> Iterator[Looked]:
        """Look only."""
        (job,) = jobs
        state = target_of(self._place, job.key)
        try:
            found = slot.call("look", job)
        except WorkerDied as death:
            found = Failure("WorkerDied", str(death), _DIED)
        yield Looked(job, state, *((None, found) if isinstance(found, Failure) else (found,)))

    def _once(self, slot: Slot, job: Job) -> Outcome:
        found = self._looked(slot, job)
        if isinstance(found, Outcome):
            return found
        self._load(slot)
        outcome: Outcome = slot.call("watch", job, found)
        return outcome

    def _looked(self, slot: Slot, job: Job) -> Outcome | Verdict:
        """What is left of a video, or its outcome where nothing is or can be done."""
        state, found = target_of(self._place, job.key), slot.call("look", job)
        if isinstance(found, Failure):
            return Outcome(job, state, "failed", failure=found)
        verdict: Verdict = found
        if verdict.standing == "done":
            failure = Failure("Damaged", verdict.damage) if verdict.damage else None
            return Outcome(
                job,
                state,
                "done",
                "done",
                steps=verdict.steps,
                stream_time_s=verdict.stream_time_s,
                file_bytes=verdict.file_bytes,
                failure=failure,
            )
        return verdict

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

    def _serve(self, index: int, act: Callable[[_Run, Slot, list[Job]], Iterator[Any]]) -> None:
        slot = self._pool.open(index)
        try:
            while jobs := self._next():
                for event in act(self, slot, jobs):
                    if not self._postponed(event.job, event.failure):
                        self._count(event.status)
                        self._events.put(event)
        except BaseException as error:
            if self._fatal is None or not isinstance(self._fatal, ProtoKVError):
                self._fatal = error
            self._stop()
        finally:
            slot.close()

    def _count(self, status: str) -> None:
        with self._taking:
            self._failed += status == "failed"
            if self._max_failures is not None and self._failed >= self._max_failures:
                self._over.set()

    def _next(self) -> list[Job]:
        """As many as a worker watches at a time; none where there is none left, or none is to be begun."""
        with self._taking:
            if self._over.is_set():
                return []
            taken = list(islice(self._jobs, self._batch))
            return taken or ([self._again.popleft()] if self._again else [])

    def _postponed(self, job: Job, failure: Failure | None) -> bool:
        """What another fleet is at is looked at once more, behind everything else: it may be done by then."""
        if failure is None or failure.kind != "StateLocked":
            return False
        with self._taking:
            if self._over.is_set() or job.key in self._seen_locked:
                return False
            self._seen_locked.add(job.key)
            self._again.append(job)
            return True

    def _stop(self) -> None:
        self._over.set()
        self._pool.stop()


_DIED = "try it alone, with --debug; if memory ran out, use fewer --workers"
