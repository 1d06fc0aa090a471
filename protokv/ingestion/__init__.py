"""From a source to a state on disk: `ingest` and the events that it yields.

The package is not called `ingest` because `protokv.ingest` is the function.
"""

from __future__ import annotations

from protokv.ingestion.events import Commit, Event, Progress, Started, Summary
from protokv.ingestion.every import MINUTELY, NEVER, Every
from protokv.ingestion.run import default_target, ingest

__all__ = [
    "MINUTELY",
    "NEVER",
    "Commit",
    "Event",
    "Every",
    "Progress",
    "Started",
    "Summary",
    "default_target",
    "ingest",
]
