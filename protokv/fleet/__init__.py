"""Fleets: many videos into as many states, by workers that each load the model once.

`plan` says which videos, `done` what is left of them, a `Pool` has workers on this machine or in a Ray cluster, and
`run_fleet` hands them out and keeps account. Knows no command line.
"""

from __future__ import annotations

from protokv.fleet.local import LocalPool
from protokv.fleet.outcome import Failure, Looked, Outcome
from protokv.fleet.plan import Job, find_states, plan, read_manifest, target_of
from protokv.fleet.recipe import Model, Recipe
from protokv.fleet.run import Pool, Slot, look_fleet, run_fleet

__all__ = [
    "Failure",
    "Job",
    "LocalPool",
    "Looked",
    "Model",
    "Outcome",
    "Pool",
    "Recipe",
    "Slot",
    "find_states",
    "look_fleet",
    "plan",
    "read_manifest",
    "run_fleet",
    "target_of",
]
