"""Workers in a Ray cluster: one actor each, on any machine with room for it.

An actor takes one GPU if the cluster has any, one CPU otherwise, and one video at a time. All
machines must reach the sources and the states: an object store, or a shared file system.
https://docs.ray.io/en/latest/ray-core/actors.html
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from protokv.errors import ConfigError
from protokv.fleet.run import WORKER_POLL_S, WorkerDied
from protokv.fleet.worker import FleetWorker, JobRecipe

_REACH_S = 10.0  # within which the head of a cluster answers


class _Actor(FleetWorker):
    """A worker in the folder of the coordinator, so that relative paths mean the same on every
    machine.
    """

    def __init__(self, recipe: JobRecipe, folder: str) -> None:
        super().__init__(recipe, "auto")
        with contextlib.suppress(OSError):
            os.chdir(folder)


class RayWorkerPool(contextlib.AbstractContextManager["RayWorkerPool"]):
    """A `WorkerPool` of actors in a cluster; leaving it ends the connection, and with it the
    actors.
    """

    def __init__(self, recipe: JobRecipe, address: str | None = None, n: int | None = None) -> None:
        """Connect to the cluster at `address`, for `n` actors. ConfigError if there is none.

        Without an address it is that of `RAY_ADDRESS`, one that runs on this machine, or a new one.
        Without a number there is an actor for each GPU of the cluster, or for each CPU if it has
        none.
        """
        try:
            if address is not None:
                # Ray itself tries for more than a minute.
                host, _, port = address.removeprefix("ray://").rpartition(":")
                socket.create_connection((host, int(port)), timeout=_REACH_S).close()
            ray.init(
                address=address,
                log_to_driver=False,
                logging_level=logging.ERROR,
                ignore_reinit_error=True,
            )
        except (OSError, RuntimeError, ValueError, OverflowError) as error:
            first = str(error).strip().partition("\n")[0]
            why = f"there is no Ray cluster at {address or 'this machine'}: {first}"
            hint = "start one with `ray start --head`, or name another: --ray HOST:PORT"
            raise ConfigError(why, hint=hint) from error
        resources = ray.cluster_resources()
        unit = "GPU" if resources.get("GPU", 0) >= 1 else "CPU"
        self.size = n or max(1, int(resources.get(unit, 1)))
        # A second thread of the actor takes `stop` while the first one watches.
        self._make = ray.remote(_Actor).options(
            max_concurrency=2, num_cpus=1, num_gpus=int(unit == "GPU")
        )
        self._recipe = recipe
        self._stopped = False
        self._actors = dict[int, Any]()

    def call(self, index: int, verb: str, *args: Any) -> Any:
        """Call a method of a worker. WorkerDied."""
        try:
            if index not in self._actors:
                self._actors[index] = actor = self._make.remote(self._recipe, str(Path.cwd()))
                ready = actor.__ray_ready__.remote()
                while not ray.wait([ready], timeout=WORKER_POLL_S)[0]:
                    if self._stopped:
                        raise WorkerDied("there was no room for it in the cluster")
            return ray.get(getattr(self._actors[index], verb).remote(*args))
        except RayTaskError as error:
            raise error.cause from None
        except RayActorError as error:
            del self._actors[index]
            raise WorkerDied(
                "its process was killed or crashed, or its machine was taken away"
            ) from error

    def stop(self) -> None:
        """Let every worker commit and return after its step."""
        self._stopped = True
        for actor in list(self._actors.values()):
            with contextlib.suppress(Exception):
                actor.stop.remote()

    def __exit__(self, *_: object) -> None:
        ray.shutdown()
