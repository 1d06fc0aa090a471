"""Workers on this machine, each a process in an executor of its own, so that one that dies is replaced.

The death of one process breaks a whole `ProcessPoolExecutor`, so each has one process: only its task is lost, and a
worker keeps its device. A worker ends with its coordinator.
https://docs.python.org/3/library/concurrent.futures.html
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from ctypes import c_bool, c_double
from typing import Any

from protokv.fleet.run import WorkerDied
from protokv.fleet.worker import Recipe, Worker

_SPAWN = multiprocessing.get_context("spawn")


class LocalPool:
    """A `Pool` of processes on this machine, on the devices in turn."""

    def __init__(self, recipe: Recipe, n: int = 1, devices: Sequence[str] = ("auto",)) -> None:
        """Start nothing yet; `n` processes will use the devices, named as in `load_backbone`."""
        self.size = n
        self._recipe, self._devices = recipe, devices
        self._executors: list[ProcessPoolExecutor | None] = [None] * n
        # Shared memory without a lock, because a worker may be killed at any instant; each writes its own entry.
        self._stopped, self._watched_s = _SPAWN.RawValue(c_bool, False), _SPAWN.RawArray(c_double, n)
        # Workers copy videos from a bucket to this folder, and one that is killed leaves its copy.
        self._scratch = tempfile.TemporaryDirectory(prefix="protokv-fleet-", ignore_cleanup_errors=True)

    @property
    def watched_s(self) -> float:
        """Seconds of stream that the workers have watched until now."""
        return sum(self._watched_s)

    def call(self, index: int, verb: str, *args: Any) -> Any:
        """Call a method of a worker. WorkerDied."""
        if hasattr(signal, "pthread_sigmask"):
            # A terminal sends these signals to all processes, but only the coordinator acts. A process that starts now
            # inherits the mask of this thread, which is one of those that wait for workers.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP, signal.SIGTERM})
        executor = self._executors[index]
        if executor is None:
            settings = (self._recipe, self._devices[index % len(self._devices)], self._scratch.name)
            shared = (self._stopped, self._watched_s, index)
            executor = self._executors[index] = ProcessPoolExecutor(1, _SPAWN, _begin, (*settings, *shared))
        try:
            return executor.submit(_call, verb, args).result()
        except BrokenProcessPool as error:
            self._executors[index] = None
            raise WorkerDied("its process was killed or crashed (out of memory, or a fault in a library)") from error

    def stop(self) -> None:
        """Let every worker commit and return after its step."""
        self._stopped.value = True

    def __enter__(self) -> LocalPool:
        return self

    def __exit__(self, *_: object) -> None:
        for executor in self._executors:
            if executor is not None:
                executor.shutdown()
        self._scratch.cleanup()


_workers: list[Worker] = []
"""The worker of this process; empty in that of the coordinator."""


def _begin(recipe: Recipe, device: str, scratch: str, stopped: Any, watched_s: Any, index: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tempfile.tempdir = scratch

    def add_watched(seconds: float) -> None:
        watched_s[index] += seconds

    _workers.append(Worker(recipe, device, lambda: bool(stopped.value), add_watched))
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when that of the coordinator ends; the state has its last commit."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _call(verb: str, args: tuple[Any, ...]) -> Any:
    return getattr(_workers[0], verb)(*args)
