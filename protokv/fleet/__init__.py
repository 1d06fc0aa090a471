"""Fleets: many videos into as many states, by workers that each load the model once.

`plan` lists the videos, a `Worker` says what is left of one and watches it, a `LocalPool` has workers on this machine
and `RayPool` (`protokv.fleet.cluster`) in a Ray cluster, and `run_fleet` hands the videos out. Knows no command line.
"""

from __future__ import annotations

from protokv.fleet.plan import Job, find_states, locate_state, plan
from protokv.fleet.run import LocalPool, run_fleet
from protokv.fleet.worker import Failure, Outcome, Recipe, preview

__all__ = [
    "Failure", "Job", "LocalPool", "Outcome", "Recipe", "find_states", "locate_state", "plan", "preview", "run_fleet",
]  # fmt: skip
