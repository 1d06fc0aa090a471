"""Estimate the steps, tokens, bytes and time of an ingest from the first steps of the source. Writes nothing."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass

from protokv.core.backbone import Backbone
from protokv.core.memory import Memory
from protokv.core.session import Session
from protokv.errors import SourceUnreadable
from protokv.ingestion.options import IngestOptions
from protokv.state.thumbnails import Thumbnails
from protokv.video import Source, read_steps
from protokv.words import Words, speak
from protokv.words.find import named
from protokv.words.transcript import Transcript

# Steps that are timed, after one that warms up. A full memory makes them slower, so steps are watched before them until
# it is full, for at most this many seconds.
STEPS, FILL_S = 8, 5.0

HEAD_BYTES = 8 << 10
"""About what a state takes beside its tensors of the stream and its thumbnails: its header, and its small tensors."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The cost of an ingest; None where it needs a duration that the source does not say.

    Attributes:
        source: its name.
        duration_s: of the source.
        steps, tokens: of the whole stream.
        tokens_per_step: mean of the tried steps.
        state_bytes: of the state in memory.
        most_bytes: of its tensors on disk once the memory is full; None: they grow with the stream.
        end_bytes: about what they take on disk at the end of the source.
        seconds: time of the run at the speed of the last tried steps.
        tried_steps: how many steps were tried.
        words: the words that would enter the stream; None: none.
        words_lost: what of them cannot be read; empty: nothing as yet.
    """

    source: str
    duration_s: float | None
    steps: int | None
    tokens: int | None
    tokens_per_step: float
    state_bytes: int
    most_bytes: int | None
    end_bytes: int | None
    seconds: float | None
    tried_steps: int
    words: str | None
    words_lost: str


def most_bytes(memory: Memory, thumbnails: int, *, words: bool = False) -> int | None:
    """Return the most bytes of the tensors of a state with so many thumbnails; None if they grow with the stream.

    With `words` it has a transcript, too.
    """
    beside = (Thumbnails(thumbnails).capacity_bytes if thumbnails else 0) + words * Transcript.capacity_bytes()
    return None if memory.most_bytes is None else memory.most_bytes + beside


def end_bytes(memory: Memory, backbone: Backbone, tokens: int, pictures: int) -> int:
    """Return about how many bytes a state takes on disk after so many tokens: each of them, until the memory is full.

    `pictures` are the bytes of its thumbnails.
    """
    held = tokens * 2 * backbone.layers * backbone.kv_heads * backbone.head_size * backbone.dtype.itemsize
    if memory.most_bytes is not None:
        held = min(held, memory.most_bytes)
    return held + HEAD_BYTES + pictures


def estimate(source: Source, backbone: Backbone, options: IngestOptions, words: Words | None) -> Estimate:
    """Watch the first steps of a source, with its words, and extrapolate to the rest.

    Steps become slower while the memory fills. If that takes longer than `FILL_S`, a long stream takes longer than this
    says.

    Raises:
        ConfigError: the memory fits neither the model nor the machine, or fps is out of range.
        SourceUnreadable: not one frame can be read.
    """
    config, thumbnails = options.config_with(words), options.thumbnails
    session = Session.start(backbone, config, fps=options.fps)
    clock = session.clock
    ends, began = deque[float](maxlen=STEPS + 1), time.perf_counter()
    tried = 0
    for step in read_steps(source, clock.fps, clock.frames_per_step):
        said = [] if words is None else words.between(step.time_s, step.time_s + clock.step_seconds)
        session.watch(step.images, step.time_s, said)
        tried += 1
        ends.append(time.perf_counter())
        filled = session.clock.tokens_seen > config.budget or ends[-1] - began > FILL_S
        if tried > STEPS and filled:
            break
    if not tried:
        raise SourceUnreadable(f"no frame of {source.info.name} can be read", hint="check that the file is a video")
    per_step_s = (ends[-1] - ends[0]) / (len(ends) - 1) if tried > 1 else None
    per_step = session.clock.tokens_seen / tried
    duration_s = source.info.duration_s
    steps = None if duration_s is None else math.ceil(duration_s / clock.step_seconds - 1e-6)
    tokens = None if steps is None else round(steps * per_step)
    pictures = Thumbnails(thumbnails).expected_bytes(steps) if thumbnails and steps else 0
    return Estimate(
        source=source.info.name,
        duration_s=duration_s,
        steps=steps,
        tokens=tokens,
        tokens_per_step=per_step,
        state_bytes=session.memory.bytes_held,
        most_bytes=most_bytes(session.memory, thumbnails, words=speak(words)),
        end_bytes=None if tokens is None else end_bytes(session.memory, backbone, tokens, pictures),
        seconds=None if steps is None or per_step_s is None else steps * per_step_s,
        tried_steps=tried,
        words=None if words is None else named(words.record),
        words_lost=(words.lost or "") if words is not None else "",
    )
