"""Fleets: many videos into as many states, by workers that each load the model once.

`plan` lists the videos, `worker` looks at and watches one, a `Pool` has workers on this machine or in a Ray cluster,
and `run_fleet` hands the videos out. Knows no command line.
"""

from __future__ import annotations

from protokv.fleet.forecast import Forecast, Remaining, forecast
from protokv.fleet.local import LocalPool
from protokv.fleet.plan import Job, find_states, plan, read_manifest, target_of
from protokv.fleet.records import Failure, InWork, Looked, Outcome, Recipe
from protokv.fleet.run import look_fleet, run_fleet

__all__ = [
    "Failure",
    "Forecast",
    "InWork",
    "Job",
    "LocalPool",
    "Looked",
    "Outcome",
    "Recipe",
    "Remaining",
    "find_states",
    "forecast",
    "look_fleet",
    "plan",
    "read_manifest",
    "run_fleet",
    "target_of",
]
