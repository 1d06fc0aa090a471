"""The one door: `ingest` streams a source through a session into a state, and yields events.

The package is not called `ingest` because `protokv.ingest` is the function.
"""

from __future__ import annotations

from protokv.ingestion.events import (
    Commit,
    Event,
    FramesDropped,
    Progress,
    SourceLost,
    SourceRecovered,
    Started,
    Summary,
)
from protokv.ingestion.options import LIVE, MINUTELY, NEVER, Every, IngestOptions, LiveOptions
from protokv.ingestion.run import default_target, ingest

__all__ = [
    "LIVE",
    "MINUTELY",
    "NEVER",
    "Commit",
    "Event",
    "Every",
    "FramesDropped",
    "IngestOptions",
    "LiveOptions",
    "Progress",
    "SourceLost",
    "SourceRecovered",
    "Started",
    "Summary",
    "default_target",
    "ingest",
]
