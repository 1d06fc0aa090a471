"""The events that `ingest` yields: plain records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Started:
    """The state is locked, and the session stands where the source is read on.

    Attributes:
        state: its name.
        source: its name.
        steps, stream_time_s: of the state until now.
        how: "started" anew, "continued" where an earlier run stopped, "appended" after other sources, or "finished":
            the source was watched to its end before, and nothing is left to do.
        locked: whether other processes are kept from writing the state.
        fps: sampled frames a second.
        source_fps: frames a second of the source; None if it does not say.
        state_bytes: of the state in memory.
        most_bytes: of the tensors of the state on disk once the memory is full; None: they grow with the stream.
        model, dtype: name of the model, and dtype of its weights, such as `bfloat16+4bit`.
        notice: what the model cannot read, in one line; empty: it reads any video.
        words: the subtitles that enter the stream; None: none.
    """

    state: str
    source: str
    how: Literal["started", "continued", "appended", "finished"]
    steps: int
    stream_time_s: float
    locked: bool
    fps: float
    source_fps: float | None
    state_bytes: int
    most_bytes: int | None
    model: str
    dtype: str
    notice: str = ""
    words: str | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """After every step: where the stream stands, how fast it goes, and how large the state is.

    Attributes:
        steps, stream_time_s: watched until now.
        duration_s: of the whole source; None if it does not say.
        frames_per_second: sampled frames that were watched in a second of the clock.
        state_bytes: of the state in memory.
        end_bytes: about what its tensors take on disk at the end of the source; None if the source does not say its
            length.
        frames_dropped: as in `Summary`, of this run.
    """

    steps: int
    stream_time_s: float
    duration_s: float | None
    frames_per_second: float
    state_bytes: int
    end_bytes: int | None = None
    frames_dropped: int = 0


@dataclass(frozen=True, slots=True)
class WordsLost:
    """Subtitles could not be read, or not all of them. Yielded once a run; the video is watched all the same.

    Attributes:
        words: which subtitles.
        why: what was wrong.
    """

    words: str
    why: str


@dataclass(frozen=True, slots=True)
class SourceLost:
    """The source gives no more frames; it is tried again until it recovers or is given up.

    Attributes:
        source: its name.
        stream_time_s: when it was lost.
        why: what was wrong.
    """

    source: str
    stream_time_s: float
    why: str


@dataclass(frozen=True, slots=True)
class SourceRecovered:
    """The source gives frames again.

    Attributes:
        source: its name.
        stream_time_s: when it came back.
        gap_s: how long it was away.
    """

    source: str
    stream_time_s: float
    gap_s: float


@dataclass(frozen=True, slots=True)
class FramesDropped:
    """The model is slower than the stream, so frames are dropped. Yielded once a run.

    Attributes:
        stream_fps: sampled frames a second that come in.
        watched_fps: frames a second that the model watches.
    """

    stream_fps: float
    watched_fps: float


@dataclass(frozen=True, slots=True)
class Commit:
    """The state at this step is on disk.

    Attributes:
        state: its name.
        steps, stream_time_s: of the state.
        file_bytes: of the state on disk.
    """

    state: str
    steps: int
    stream_time_s: float
    file_bytes: int


@dataclass(frozen=True, slots=True)
class Summary:
    """The end of a run.

    Attributes:
        state: its name.
        steps, tokens_seen: of the whole stream.
        stream_time_s: at the end of the last step.
        watched_s: at the end of the source, which may lie within that step; `stream_time_s` if it was not reached.
        state_bytes, file_bytes: of the state in memory and on disk.
        elapsed_s: that this run took.
        complete: the source was read to its end.
        damaged: this run or an earlier one could not read all of the source.
        damage: what could not be read, where and why.
        frames_dropped: sampled frames of a live source that the model had no time for, in all runs.
        gaps: how often a live source was lost, in all runs.
        words_lost: what of the subtitles could not be read, in this run or an earlier one; empty: nothing.
    """

    state: str
    steps: int
    stream_time_s: float
    watched_s: float
    tokens_seen: int
    state_bytes: int
    file_bytes: int
    elapsed_s: float
    complete: bool
    damaged: bool
    damage: str
    frames_dropped: int = 0
    gaps: int = 0
    words_lost: str = ""


Event = Started | Progress | WordsLost | SourceLost | SourceRecovered | FramesDropped | Commit | Summary
