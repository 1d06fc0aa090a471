"""Fleets: many videos into as many states, by workers that each load the model once.

`plan` lists the videos, `worker` looks at and watches one, a `Pool` has workers on this machine or in a Ray cluster,
and `run_fleet` hands the videos out. Knows no command line.
"""

from __future__ import annotations

from protokv.fleet.local import LocalPool
from protokv.fleet.plan import Job, find_states, plan, read_manifest, target_of
from protokv.fleet.records import Failure, Looked, Outcome, Recipe
from protokv.fleet.run import look_fleet, run_fleet

__all__ = [
    "Failure",
    "Job",
    "LocalPool",
    "Looked",
    "Outcome",
    "Recipe",
    "find_states",
    "look_fleet",
    "plan",
    "read_manifest",
    "run_fleet",
    "target_of",
]
