"""The one door: `ingest` streams a source through a session into a state; `ingest_events` yields what happens.

The package is not called `ingest` because `protokv.ingest` is the function.
"""

from __future__ import annotations

from protokv.ingestion.events import (
    Answered,
    Commit,
    FramesDropped,
    IngestEvent,
    Progress,
    SourceLost,
    SourceNoted,
    SourceRecovered,
    Started,
    Summary,
    WordsLost,
)
from protokv.ingestion.options import COMMIT_NEVER, Every, IngestOptions, LiveOptions, StandingQuestion
from protokv.ingestion.run import ingest, ingest_events

__all__ = [
    "COMMIT_NEVER", "Answered", "Commit", "Every", "FramesDropped", "IngestEvent", "IngestOptions", "LiveOptions",
    "Progress", "SourceLost", "SourceNoted", "SourceRecovered", "StandingQuestion", "Started", "Summary", "WordsLost",
    "ingest", "ingest_events",
]  # fmt: skip
