"""The events that `ingest_events` yields: plain records. A command prints them as JSON, with these
names as keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from protokv.state.sources import StandingAnswer, VideoPlace
from protokv.stream.answer import Promise
from protokv.stream.evidence import EvidenceSpan


@dataclass(frozen=True, slots=True)
class IngestStarted:
    """The state is locked, and the session stands where the source is read on."""

    state: str  # its name
    source: str  # its name
    # finished: watched to its end before, nothing to do
    how: Literal["started", "continued", "appended", "finished"]
    steps: int  # total of the state until now
    stream_time_s: float
    locked: bool  # other processes are kept from writing the state
    fps: float  # sampled frames a second
    source_fps: float | None  # frames a second of the source; None: it does not say
    # bytes of the state in memory; the first step of a stream may change this and the next
    state_bytes: int
    # bytes of its tensors on disk once the memory is full; None: they grow with the stream
    most_bytes: int | None
    model: str
    dtype: str  # dtype of the model's weights, such as `bfloat16+4bit`
    notice: str = ""  # a limit of what the model reads, in one line; empty: it reads any video
    words: str | None = None  # the subtitles that enter the stream; None: none


@dataclass(frozen=True, slots=True)
class IngestProgress:
    """After every step or chunk: where the stream stands, how fast it goes, and how large the state
    is.
    """

    steps: int  # watched until now
    stream_time_s: float
    duration_s: float | None  # length of the whole source; None: it does not say
    frames_per_second: float  # sampled frames that were watched in a second of the clock
    state_bytes: int  # bytes of the state in memory
    # about what it takes on disk at the end of the source; None: no length is known
    end_bytes: int | None = None
    frames_dropped: int = 0  # as in `IngestSummary`, until now
    tokens_seen: int = 0  # visual tokens and words of the stream until now
    # of the memory, once it is full: the last tokens, exactly, and what stands for older ones; the
    # rest of the budget is for words
    near_tokens: int = 0
    prototypes: int = 0


@dataclass(frozen=True, slots=True)
class SourceNoted:
    """What a user should know of the source that is no damage, such as that it has several video
    tracks.
    """

    source: str  # its name
    note: str


@dataclass(frozen=True, slots=True)
class WordsLost:
    """Subtitles could not be read, or not all of them. Yielded once a run; the video is watched all
    the same.
    """

    words: str  # which subtitles
    why: str


@dataclass(frozen=True, slots=True)
class SourceLost:
    """The source gives no more frames; it is tried again until it recovers or is given up."""

    source: str  # its name
    stream_time_s: float  # when it was lost
    why: str


@dataclass(frozen=True, slots=True)
class SourceRecovered:
    """The source gives frames again."""

    source: str  # its name
    stream_time_s: float  # when it came back
    gap_s: float  # how long it was away


@dataclass(frozen=True, slots=True)
class FramesDropped:
    """The model is slower than the stream, so frames are dropped. Yielded once a run."""

    stream_fps: float  # sampled frames a second of the stream
    watched_fps: float  # frames a second that the model watches


@dataclass(frozen=True, slots=True)
class QuestionAnswered(StandingAnswer):
    """A standing question was answered, from what was watched until then."""

    probabilities: dict[str, float] | None = None  # probability of each choice
    # the spans that the answer stood on; None unless asked for
    evidence: list[EvidenceSpan] | None = None
    promise: Promise | None = None  # what is promised of the answer; None: nothing
    took_s: float = 0.0  # time that asking took
    late_s: float | None = None  # how far behind a live source the answer came; None: it is a file
    frames_dropped: int = 0  # sampled frames that a live source lost meanwhile
    notice: str = ""  # why the answer means nothing; empty: the model can read the video
    # where the videos so far are in the stream; JSON has `video` and `video_time_s` instead, where
    # the times differ, and spans have `video_start_s` and `video_end_s`
    videos: Sequence[VideoPlace] = ()


@dataclass(frozen=True, slots=True)
class Commit:
    """The state at this step is on disk."""

    state: str  # its name
    steps: int
    stream_time_s: float
    file_bytes: int  # bytes of the state on disk


@dataclass(frozen=True, slots=True)
class IngestSummary:
    """The end of a run. What is lost or damaged counts all runs over the source."""

    state: str  # its name
    steps: int  # of the whole stream
    stream_time_s: float  # at the end of the last step
    # at the end of the source, which may lie within that step; `stream_time_s` before the end
    watched_s: float
    tokens_seen: int  # of the whole stream
    state_bytes: int  # bytes of the state in memory
    file_bytes: int  # bytes of the state on disk
    elapsed_s: float  # time that this run took
    complete: bool  # the source was read to its end
    damaged: bool  # not all of the source could be read
    damage: str  # damage: its kind, place and cause
    frames_dropped: int = 0  # sampled frames of a live source that the model had no time for
    gaps: int = 0  # how often a live source was lost
    words_lost: str = ""  # a note on subtitles that could not be read; empty: nothing


_News = SourceNoted | WordsLost | SourceLost | SourceRecovered | FramesDropped | QuestionAnswered
IngestEvent = IngestStarted | IngestProgress | _News | Commit | IngestSummary
