"""Workers in a Ray cluster: one actor each, on any machine with room for it.

Ray places actors and notices their deaths; nothing is scheduled here. An actor takes one GPU if the cluster has any,
one CPU otherwise, and one video at a time. The videos of a machine that is taken away continue elsewhere from their
last commits, without counting as failed. All machines must reach the sources and the states: an object store, or a
shared file system. https://docs.ray.io/en/latest/ray-core/actors.html
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
from protokv.fleet.records import Recipe
from protokv.fleet.run import WorkerDied
from protokv.fleet.worker import Worker

# Seconds between two questions whether to stop, while a call waits for room in the cluster.
ASK_S = 0.2

# The head of a cluster answers within this time.
REACH_S = 10.0

# An actor that is neither dead nor back after this time is ended.
LOST_S = 120.0


class _Actor(Worker):
    """A worker that knows where it is."""

    def where(self) -> str:
        """Return the id of its node."""
        return str(ray.get_runtime_context().get_node_id())


class RayPool:
    """Actors in a cluster; a context manager that ends them and the connection."""

    def __init__(self, recipe: Recipe, address: str | None = None, n: int | None = None) -> None:
        """Connect.

        Args:
            recipe: the options of all videos.
            address: of the cluster; None: of `RAY_ADDRESS`, of one that runs on this machine, or of a new one.
            n: number of actors; None: one per GPU of the cluster, or per CPU if it has none.

        Raises:
            ConfigError: there is no cluster at the address.
        """
        if address is not None:
            _check_reachable(address)
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, ignore_reinit_error=True)
        except (ConnectionError, RuntimeError, ValueError) as error:
            first = str(error).strip().partition("\n")[0]
            raise _no_cluster(address or "this machine", first) from error
        resources = ray.cluster_resources()
        unit = "GPU" if resources.get("GPU", 0) >= 1 else "CPU"
        self.size = n or max(1, int(resources.get(unit, 1)))
        self._needs = {"num_gpus": 1, "num_cpus": 1} if unit == "GPU" else {"num_cpus": 1}
        self._recipe = recipe
        self._stopped = threading.Event()
        self._slots: list[RaySlot] = []

    def open(self, index: int) -> RaySlot:
        """Return the slot of a worker; its actor starts with the first call."""
        slot = RaySlot(self._recipe, self._needs, self._stopped)
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
    """Fail fast: Ray itself tries for more than a minute. ConfigError."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=REACH_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise _no_cluster(address, error) from error


def _no_cluster(place: str, why: object) -> ConfigError:
    return ConfigError(
        f"there is no Ray cluster at {place}: {why}",
        hint="start one with `ray start --head`, or name another: --ray HOST:PORT",
    )


class RaySlot:
    """One actor, replaced after it died."""

    def __init__(self, recipe: Recipe, needs: dict[str, int], stopped: threading.Event) -> None:
        """Start nothing yet; the actor needs these resources. Once `stopped` is set, no call waits for room."""
        # A second thread of the actor takes `stop` while the first one watches.
        self._make = ray.remote(_Actor).options(max_concurrency=2, **needs)
        self._recipe, self._stopped = recipe, stopped
        self._actor: Any = None
        self._node = ""

    def call(self, verb: str, *args: Any) -> Any:
        """Call a method of the worker. WorkerDied."""
        if self._actor is None:
            self._actor = self._make.remote(self._recipe, "auto")
            self._node = self._get(self._actor.where.remote(), waits=True)
        return self._get(getattr(self._actor, verb).remote(*args), waits=False)

    def standing(self) -> list[tuple[float, float]]:
        """Return nothing: an actor says how far it is only when it returns."""
        return []

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
        """Return True if the actor went with its machine, or cannot be reached; wait until the cluster knows."""
        deadline = time.monotonic() + LOST_S
        while time.monotonic() < deadline:
            try:
                ray.get(self._actor.where.remote(), timeout=ASK_S)
            except ActorDiedError:
                return all(node["NodeID"] != self._node or not node["Alive"] for node in ray.nodes())
            except Exception:
                time.sleep(ASK_S)
            else:
                # It is back, but it may have lost its video.
                return True
        return True
