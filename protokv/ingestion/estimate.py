"""Estimate the steps, tokens, bytes and time of an ingest from the first steps of the source.
Writes nothing.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from dataclasses import dataclass

from protokv.errors import SourceUnreadable
from protokv.ingestion.options import IngestOptions
from protokv.memories import MemoryConfig
from protokv.state.thumbnails import Thumbnails
from protokv.stream.session import Session
from protokv.video import Source, open_source, read_steps
from protokv.words.cues import Subtitles
from protokv.words.find import find_subtitles, name_subtitles
from protokv.words.transcript import MOST_TRANSCRIPT_BYTES, Transcript

# Steps that are timed, after one that warms up. A full memory makes them slower, so steps are
# watched before them until it is full, for at most this many seconds.
_STEPS = 8
_FILL_S = 5.0

_HEAD_BYTES = 8 << 10
"""About what a state takes beside its tensors of the stream and its thumbnails: its header, and its
small tensors.
"""


@dataclass(frozen=True, slots=True)
class IngestEstimate:
    """The cost of an ingest; None where it needs a duration that the source does not say."""

    source: str  # its name
    duration_s: float | None
    steps: int | None  # of the whole stream
    tokens: int | None  # of the whole stream
    tokens_per_step: float  # mean of the tried steps
    state_bytes: int  # bytes of the state in memory
    # bytes of its tensors on disk once the memory is full; None: they grow with the stream
    most_bytes: int | None
    end_bytes: int | None  # about what it takes on disk at the end of the source
    seconds: float | None  # time of the run at the speed of the last tried steps
    tried_steps: int
    # of the memory once it is full, as in `IngestProgress`
    near_tokens: int
    prototypes: int
    words: str | None  # the subtitles that would enter the stream; None: none
    words_lost: str  # a note on those that cannot be read; empty: nothing as yet
    notes: list[str]  # notes for the user on the source


def bound_state_bytes(
    session: Session, thumbnails: Thumbnails | None, *, words: bool = False
) -> int | None:
    """Return the most bytes of a state's tensors, its thumbnails and, with `words`, its transcript;
    None: they grow.
    """
    attached = (thumbnails.capacity_bytes if thumbnails else 0) + words * MOST_TRANSCRIPT_BYTES
    beside = attached + session.state_bytes - session.memory.bytes_held
    return None if session.memory.most_bytes is None else session.memory.most_bytes + beside


def count_prototypes(config: MemoryConfig) -> int:
    """Return how many prototypes stand for older tokens, one token each; 0: none, or not so."""
    return 0 if hasattr(config, "pseudo_tokens") else config.prototypes


def estimate_end_bytes(session: Session, end_s: float, thumbnails: Thumbnails | None) -> int:
    """Return about how many bytes a state takes on disk once its stream reaches `end_s`, going on
    as until now.
    """
    memory = session.memory
    backbone = session.backbone
    clock = session.clock
    share = max(1.0, end_s / clock.stream_time_s)
    token_bytes = (
        2 * backbone.layers * backbone.kv_heads * backbone.head_size * backbone.dtype.itemsize
    )
    tokens = round(clock.tokens_seen * share)
    budget = session.config.budget
    most = memory.most_bytes
    # Each token, until the memory is full.
    kept = (
        tokens * token_bytes
        if most is None
        else min(tokens, budget) * min(token_bytes, most // budget)
    )
    return kept + _HEAD_BYTES + (0 if thumbnails is None else thumbnails.capacity_bytes)


def estimate_ingest(source: str | os.PathLike[str], options: IngestOptions) -> IngestEstimate:
    """Watch the first steps of a video, with its words, and extrapolate to the rest.

    Steps become slower while the memory fills. If that takes longer than `_FILL_S`, a long stream
    takes more than this says. SourceError: it is not there, or not one frame can be read.
    ModelError: the model cannot be loaded. ConfigError: the memory fits neither the model nor the
    machine, or an option is out of range.
    """
    with open_source(source, options.decoder, max_pixels=options.max_frame_pixels) as opened:
        video = options.cut_part(opened)
        subtitles = find_subtitles(video, source, options.subtitles, options.start_s)
        model = options.load_model()
        config = options.config_for(subtitles)
        session = Session.start(model, config, fps=options.fps, attachments=[Transcript()])
        return _try_steps(video, session, subtitles, options.thumbnails)


def _try_steps(
    source: Source, session: Session, subtitles: Subtitles, thumbnails: int
) -> IngestEstimate:
    info = source.info
    fps = session.clock.fps
    step_s = session.clock.step_seconds
    length_s = info.duration_s
    ends = deque[float](maxlen=_STEPS + 1)
    began = time.perf_counter()
    tried = 0
    for step in read_steps(source, fps, session.clock.frames_per_step):
        session.watch(
            step.images, step.time_s, subtitles.between(step.time_s, step.time_s + step_s)
        )
        tried += 1
        ends.append(time.perf_counter())
        filled = session.clock.tokens_seen > session.config.budget or ends[-1] - began > _FILL_S
        if tried > _STEPS and filled:
            break
    else:
        # Read to its end: what it says of itself may be wrong, as of recordings that were joined.
        if length_s is None or abs(session.clock.stream_time_s - length_s) >= step_s:
            length_s = session.clock.stream_time_s
    if not tried:
        raise SourceUnreadable(
            f"no frame of {info.name} can be read", hint="check that the file is a video"
        )
    per_step = session.clock.tokens_seen / tried
    steps = None if length_s is None else math.ceil(length_s / step_s - 1e-6)
    pictures = Thumbnails(thumbnails) if thumbnails else None
    return IngestEstimate(
        source=info.name,
        duration_s=length_s,
        steps=steps,
        tokens=None if steps is None else round(steps * per_step),
        tokens_per_step=per_step,
        state_bytes=session.state_bytes,
        most_bytes=bound_state_bytes(session, pictures, words=subtitles.has_lines),
        end_bytes=None if steps is None else estimate_end_bytes(session, steps * step_s, pictures),
        seconds=None
        if steps is None or tried == 1
        else steps * (ends[-1] - ends[0]) / (len(ends) - 1),
        tried_steps=tried,
        near_tokens=session.config.near_tokens,
        prototypes=count_prototypes(session.config),
        words=name_subtitles(subtitles.record),
        words_lost=subtitles.lost or "",
        notes=list(source.notes),
    )
