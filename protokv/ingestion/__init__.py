"""The one door: `ingest` streams a source through a session into a state; `ingest_events` yields
what happens.

The package is not called `ingest` because `protokv.ingest` is the function.
"""

from __future__ import annotations

from protokv.ingestion.events import (
    Commit,
    FramesDropped,
    IngestEvent,
    IngestProgress,
    IngestStarted,
    IngestSummary,
    QuestionAnswered,
    SourceLost,
    SourceNoted,
    SourceRecovered,
    WordsLost,
)
from protokv.ingestion.options import (
    COMMIT_NEVER,
    Every,
    IngestOptions,
    LiveOptions,
    StandingQuestion,
)
from protokv.ingestion.run import ingest, ingest_events
from protokv.ingestion.several import ingest_together

__all__ = [
    "COMMIT_NEVER",
    "Commit",
    "Every",
    "FramesDropped",
    "IngestEvent",
    "IngestOptions",
    "IngestProgress",
    "IngestStarted",
    "IngestSummary",
    "LiveOptions",
    "QuestionAnswered",
    "SourceLost",
    "SourceNoted",
    "SourceRecovered",
    "StandingQuestion",
    "WordsLost",
    "ingest",
    "ingest_events",
    "ingest_together",
]
