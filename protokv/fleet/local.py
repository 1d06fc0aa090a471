"""Workers on this machine, each a process in an executor of its own, so that one that dies is replaced.

The death of one process breaks a whole `ProcessPoolExecutor`, so each has one process: only its task is lost, and a
worker keeps its device. A worker ends with its coordinator.
https://docs.python.org/3/library/concurrent.futures.html
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from ctypes import c_bool, c_double
from typing import Any

from protokv.fleet.run import WorkerDied
from protokv.fleet.worker import Recipe, Worker

_SPAWN = multiprocessing.get_context("spawn")


class LocalPool:
    """Workers on this machine, on the devices in turn; a context manager that ends them."""

    def __init__(self, recipe: Recipe, n: int = 1, devices: Sequence[str] = ("auto",)) -> None:
        """Start nothing yet; `n` processes will use the devices, named as in `load_backbone`."""
        self.size = n
        self._recipe, self._devices = recipe, devices
        # Shared memory without a lock, because a worker may be killed at any instant; each writes its own place.
        self._stopped, self._watched_s = _SPAWN.RawValue(c_bool, False), _SPAWN.RawArray(c_double, n)
        self._scratch = tempfile.TemporaryDirectory(prefix="protokv-fleet-", ignore_cleanup_errors=True)

    @property
    def watched_s(self) -> float:
        """Seconds of stream that the workers have watched until now."""
        return sum(self._watched_s)

    def open(self, index: int) -> LocalSlot:
        """Return the slot of a worker; its process starts with the first call."""
        device = self._devices[index % len(self._devices)]
        return LocalSlot((self._recipe, device, self._stopped, self._watched_s, index, self._scratch.name))

    def stop(self) -> None:
        """Let every worker commit and return after its step."""
        self._stopped.value = True

    def __enter__(self) -> LocalPool:
        return self

    def __exit__(self, *_: object) -> None:
        # Workers may have left files behind.
        self._scratch.cleanup()


class LocalSlot:
    """One process, started anew after it died."""

    def __init__(self, settings: tuple[Any, ...]) -> None:
        """Keep the arguments of `_begin`."""
        self._settings = settings
        self._executor: ProcessPoolExecutor | None = None

    def call(self, verb: str, *args: Any) -> Any:
        """Call a method of the worker. WorkerDied."""
        if self._executor is None:
            self._executor = ProcessPoolExecutor(1, _SPAWN, _begin, self._settings)
        try:
            with _signals_blocked():
                future = self._executor.submit(_serve, verb, args)
            return future.result()
        except BrokenProcessPool as error:
            self.close()
            raise WorkerDied("its process was killed or crashed (out of memory, or a fault in a library)") from error

    def close(self) -> None:
        """End the process once it is idle."""
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Start processes with these signals blocked: a terminal sends them to all, but only the coordinator acts."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_workers: list[Worker] = []
"""The worker of this process; empty in that of the coordinator."""


def _begin(recipe: Recipe, device: str, stopped: Any, watched_s: Any, index: int, scratch: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Videos from an object store are copied here; the coordinator removes the files of a killed process.
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


def _serve(verb: str, args: tuple[Any, ...]) -> Any:
    return getattr(_workers[0], verb)(*args)
