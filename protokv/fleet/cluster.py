"""Workers in a Ray cluster: one actor each, on whatever machine Ray finds room for it.

Ray places actors and notices their deaths; nothing is scheduled here. An actor takes one GPU where the cluster has any,
one CPU otherwise, and one video at a time, so as many videos are in flight as there are actors. When a machine is taken
away, its videos go on elsewhere from their last commits, which is no failure of theirs. What workers read and write
must be reachable from every machine: an object store, or a shared file system.
https://docs.ray.io/en/latest/ray-core/actors.html
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayTaskError

from protokv.errors import ConfigError
from protokv.fleet.recipe import Recipe
from protokv.fleet.run import WorkerDied
from protokv.fleet.worker import Worker

ASK_S = 0.2
"""How often a call that waits for room in the cluster asks whether to stop."""

REACH_S = 10.0
"""How long the head of a cluster may take to answer."""

LOST_S = 120.0
"""How long an actor that does not answer may be neither dead nor back; then it is ended."""


class _Actor(Worker):
    """A worker that knows where it is."""

    def where(self) -> str:
        """The id of its node."""
        return str(ray.get_runtime_context().get_node_id())


class RayPool:
    """Actors in a cluster; a context manager that ends them and the connection."""

    def __init__(self, recipe: Recipe, address: str | None = None, n: int | None = None) -> None:
        """Connect.

        Args:
            recipe: what is the same for all videos.
            address: of the cluster; where None that of `RAY_ADDRESS`, of one that runs on this machine, or a new one.
            n: actors; one per GPU of the cluster, or per CPU where it has none, if None.

        Raises:
            ConfigError: there is no cluster at the address.
        """
        if address is not None:
            _check_reachable(address)
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, ignore_reinit_error=True)
        except (ConnectionError, RuntimeError, ValueError) as error:
            first = str(error).strip().partition("\n")[0]
            raise ConfigError(
                f"there is no Ray cluster at {address or 'this machine'}: {first}",
                hint="start one with `ray start --head`, or name another: --ray HOST:PORT",
            ) from error
        resources = ray.cluster_resources()
        self._unit = "GPU" if resources.get("GPU", 0) >= 1 else "CPU"
        self.size = n or max(1, int(resources.get(self._unit, 1)))
        self._recipe = recipe
        self._stopped = threading.Event()
        self._slots: list[RaySlot] = []

    def open(self, index: int) -> RaySlot:
        """The slot of a number; its actor is asked for with the first call."""
        needs = {"num_gpus": 1, "num_cpus": 1} if self._unit == "GPU" else {"num_cpus": 1}
        slot = RaySlot(self._recipe, needs, self._stopped)
        self._slots.append(slot)
        return slot

    def stop(self) -> None:
        """Let every actor commit and return after its step."""
        self._stopped.set()
        for slot in self._slots:
            slot.stop()

    def __enter__(self) -> RayPool:
        return self

    def __exit__(self, *_: object) -> None:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Ray itself tries for more than a minute. ConfigError."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=REACH_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"there is no Ray cluster at {address}: {error}",
            hint="start one with `ray start --head`, or name another: --ray HOST:PORT",
        ) from error


class RaySlot:
    """One actor, replaced when it died."""

    def __init__(self, recipe: Recipe, needs: dict[str, int], stopped: threading.Event) -> None:
        """Nothing is started yet.

        Args:
            recipe: of the worker.
            needs: resources of the actor.
            stopped: no call waits for room any more.
        """
        # A second thread of the actor hears `stop` while the first one watches.
        self._make = ray.remote(_Actor).options(max_concurrency=2, **needs)
        self._recipe, self._stopped = recipe, stopped
        self._actor: Any = None
        self._node = ""

    def call(self, verb: str, *args: Any) -> Any:
        """What a method of the worker returns or raises. WorkerDied."""
        if self._actor is None:
            self._actor = self._make.remote(self._recipe, "auto")
            self._node = self._get(self._actor.where.remote(), waits=True)
        return self._get(getattr(self._actor, verb).remote(*args), waits=False)

    def stop(self) -> None:
        """Tell the actor, if there is one."""
        actor = self._actor
        if actor is not None:
            with contextlib.suppress(Exception):
                actor.stop.remote()

    def close(self) -> None:
        """End the actor."""
        actor, self._actor = self._actor, None
        if actor is not None:
            with contextlib.suppress(Exception):
                ray.kill(actor)

    def _get(self, ref: Any, *, waits: bool) -> Any:
        try:
            while not ray.wait([ref], timeout=ASK_S if waits else None)[0]:
                if self._stopped.is_set():
                    self.close()
                    raise WorkerDied("there was no room for it in the cluster", innocent=True)
            return ray.get(ref)
        except RayTaskError as error:
            raise error.cause from None
        except RayActorError as error:
            innocent = self._is_lost()
            self.close()
            what = "its machine was taken away" if innocent else "its process was killed or crashed"
            raise WorkerDied(what, innocent=innocent) from error

    def _is_lost(self) -> bool:
        """Whether the actor went with its machine, or cannot be reached; known once the cluster has noticed."""
        deadline = time.monotonic() + LOST_S
        while time.monotonic() < deadline:
            try:
                ray.get(self._actor.where.remote(), timeout=ASK_S)
            except ActorDiedError:
                return all(node["NodeID"] != self._node or not node["Alive"] for node in ray.nodes())
            except Exception:
                time.sleep(ASK_S)
            else:
                # It is back, but whether it still works on what it was asked for nobody knows.
                return True
        return True
