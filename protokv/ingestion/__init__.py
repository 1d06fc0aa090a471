"""From a source to a state on disk: `ingest` and the events that it yields.

The package is not called `ingest` because `protokv.ingest` is the function.
"""

from __future__ import annotations

from protokv.ingestion.events import Back, Commit, Event, Lost, Progress, Slow, Started, Summary
from protokv.ingestion.every import LIVE, MINUTELY, NEVER, Every
from protokv.ingestion.live_options import LiveOptions
from protokv.ingestion.run import default_target, ingest

__all__ = [
    "LIVE",
    "MINUTELY",
    "NEVER",
    "Back",
    "Commit",
    "Event",
    "Every",
    "LiveOptions",
    "Lost",
    "Progress",
    "Slow",
    "Started",
    "Summary",
    "default_target",
    "ingest",
]
