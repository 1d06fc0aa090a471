"""Fleets: many videos into as many states, by workers that each load the model once.

`list_video_jobs` lists the videos, a `FleetWorker` says what is left of one and watches it, a
`LocalWorkerPool` has a process for each worker, and `run_fleet` hands the videos out.
"""

from __future__ import annotations

from protokv.fleet.plan import VideoJob, list_video_jobs, locate_fleet_state
from protokv.fleet.run import LocalWorkerPool, run_fleet
from protokv.fleet.worker import JobRecipe, VideoFailure, VideoOutcome, preview_fleet

__all__ = [
    "JobRecipe",
    "LocalWorkerPool",
    "VideoFailure",
    "VideoJob",
    "VideoOutcome",
    "list_video_jobs",
    "locate_fleet_state",
    "preview_fleet",
    "run_fleet",
]
