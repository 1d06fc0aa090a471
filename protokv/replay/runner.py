"""One pass over a stream serves all memories, questions and delays: steps are embedded once, asking is read-only.

Owns the order of things and the clock of the latencies: every answer is timed around the same boundary (question in,
first token, last token), after one question that is not counted. Knows no files of results and no tables.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from protokv.backbones.base import Backbone
from protokv.config import MemoryConfig
from protokv.generate import Decoding
from protokv.replay.judge import is_expected
from protokv.replay.rows import Row
from protokv.replay.schedule import Ask, Schedule
from protokv.replay.streams import Stream
from protokv.session import Session

Key = tuple[str, str, str, int, float]


@dataclass(frozen=True, slots=True)
class Variant:
    """A memory under test and the name that tables give it."""

    label: str
    config: MemoryConfig


@dataclass(frozen=True, slots=True)
class Watched:
    """After every step: where the pass stands."""

    video: str
    stream_time_s: float
    length_s: float


@dataclass(slots=True)
class _Run:
    variant: Variant
    session: Session
    asks: list[Ask]
    busy_s: float = 0.0
    warm: bool = False


def replay(
    backbone: Backbone,
    stream: Stream,
    plan: Schedule,
    variants: Sequence[Variant],
    *,
    fps: float | None = None,
    done: Collection[Key] = (),
    decoding: Decoding | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[Row | Watched]:
    """Watch a stream once and ask what is planned of every memory.

    Args:
        backbone: the model; all memories share it.
        stream: what to watch.
        plan: what to ask when.
        variants: the memories.
        fps: sampled frames per second; the model's default where None.
        done: keys of rows that are there already; a memory with nothing left to answer is not run.
        decoding: greedy, at most 16 tokens, where None.
        should_stop: asked after every step.

    Yields:
        A `Watched` after every step, and a `Row` for each answer.
    """
    runs = []
    for variant in variants:
        asks = [ask for ask in plan.asks if key_of(stream, ask, variant) not in done]
        if asks:
            runs.append(_Run(variant, Session.start(backbone, variant.config, fps=fps), asks))
    if not runs:
        return
    decoding = decoding or Decoding(max_new_tokens=16)
    rate = backbone.default_fps if fps is None else fps
    for step in stream.steps(rate, backbone.frames_per_step):
        tokens = runs[0].session.embed(step.images, step.time_s)
        for run in runs:
            began = time.perf_counter()
            run.session.take(tokens, step.time_s)
            _synchronise(backbone)
            run.busy_s += time.perf_counter() - began
        for run in runs:
            yield from _due(backbone, stream, run, decoding, last=False)
        yield Watched(stream.name, runs[0].session.clock.stream_time_s, stream.length_s)
        runs = [run for run in runs if run.asks]
        if should_stop() or not runs:
            return
    # The last sampling time may lie a fraction of a step before the end that the container names.
    for run in runs:
        yield from _due(backbone, stream, run, decoding, last=True)


def key_of(stream: Stream, ask: Ask, variant: Variant) -> Key:
    """The key of the row that an ask will give."""
    return stream.name, ask.question.id, variant.label, variant.config.budget, ask.delay_s


def _due(backbone: Backbone, stream: Stream, run: _Run, decoding: Decoding, *, last: bool) -> Iterator[Row]:
    clock = run.session.clock
    while run.asks and (last or run.asks[0].at_s <= clock.stream_time_s + 1e-6):
        ask = run.asks.pop(0)
        if not run.warm:
            run.session.ask(ask.question.text, decoding)
            run.warm = True
        _synchronise(backbone)
        answer = run.session.ask(ask.question.text, decoding)
        question = ask.question
        yield Row(
            video=stream.name,
            question_id=question.id,
            question=question.text,
            type=question.type,
            expected=question.answer,
            reference=question.reference,
            reference_s=question.reference_s,
            delay_s=ask.delay_s,
            asked_s=clock.stream_time_s,
            memory=run.variant.label,
            budget=run.variant.config.budget,
            config=run.variant.config.to_dict(),
            prediction=answer.text,
            correct=is_expected(answer.text, question.answer),
            ttft_ms=round(answer.ttft_ms, 3),
            total_ms=round(answer.total_ms, 3),
            context_tokens=answer.context_tokens,
            state_bytes=sum(run.session.memory.nbytes().values()),
            peak_bytes=_peak_bytes(backbone),
            seconds_per_step=round(run.busy_s / clock.steps, 6),
            tokens_seen=clock.tokens_seen,
        )


def _synchronise(backbone: Backbone) -> None:
    if backbone.device.type == "cuda":
        torch.cuda.synchronize(backbone.device)


def _peak_bytes(backbone: Backbone) -> int:
    if backbone.device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(backbone.device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
