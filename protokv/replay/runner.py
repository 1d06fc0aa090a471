"""One pass over a stream serves all memories, questions and delays: steps are embedded once, asking is read-only.

Owns the order of things and the clock of the latencies: every answer is timed around the same boundary (question in,
first token, last token), after one question that is not counted. Knows no files of results and no tables.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Self

import torch

from protokv.backbones.base import Backbone
from protokv.config import MemoryConfig
from protokv.generate import Decoding
from protokv.replay.judge import is_expected
from protokv.replay.rows import Row, Trial
from protokv.replay.schedule import Ask, Schedule
from protokv.replay.streams import Stream
from protokv.session import Session

SHORT = Decoding(max_new_tokens=16)


@dataclass(frozen=True, slots=True)
class Variant:
    """A memory under test and the name that tables give it."""

    label: str
    config: MemoryConfig


@dataclass(frozen=True, slots=True)
class Setup:
    """How streams are watched and questions answered: the same for all trials of a run.

    Attributes:
        model: which one, as states name it.
        fps: sampled frames per second.
        frames_per_step: sampled frames that make one step.
        decoding: of answers.
    """

    model: dict[str, str]
    fps: float
    frames_per_step: int
    decoding: Decoding = SHORT

    @classmethod
    def of(cls, backbone: Backbone, *, fps: float | None = None, decoding: Decoding = SHORT) -> Self:
        """The setup of a backbone, at its own rate where `fps` is None."""
        rate = backbone.default_fps if fps is None else fps
        return cls(asdict(backbone.identity), float(rate), backbone.frames_per_step, decoding)

    def trial(self, stream: Stream, ask: Ask, variant: Variant) -> Trial:
        """What an ask is under one memory."""
        question = ask.question
        return Trial(
            video=stream.name,
            question_id=question.id,
            question=question.text,
            type=question.type,
            expected=question.answer,
            reference=question.reference,
            reference_s=question.reference_s,
            delay_s=float(ask.delay_s),
            memory=variant.label,
            budget=variant.config.budget,
            config=variant.config.to_dict(),
            stream=stream.facts | {"fps": self.fps, "frames_per_step": self.frames_per_step},
            model=self.model,
            decoding=asdict(self.decoding),
        )


@dataclass(frozen=True, slots=True)
class Watched:
    """After every step: where the pass stands."""

    video: str
    stream_time_s: float
    length_s: float


@dataclass(slots=True)
class _Run:
    session: Session
    left: list[tuple[Ask, Trial]]
    busy_s: float = 0.0
    warm: bool = False


def replay(
    backbone: Backbone,
    stream: Stream,
    plan: Schedule,
    variants: Sequence[Variant],
    setup: Setup,
    *,
    done: Collection[str] = (),
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[Row | Watched]:
    """Watch a stream once and ask what is planned of every memory.

    Args:
        backbone: the model; all memories share it.
        stream: what to watch.
        plan: what to ask when.
        variants: the memories.
        setup: of this backbone.
        done: keys of rows that are there already; a memory with nothing left to answer is not run.
        should_stop: asked after every step.

    Yields:
        A `Watched` after every step, and a `Row` for each answer.
    """
    runs = []
    for variant in variants:
        left = [(ask, trial) for ask in plan.asks if (trial := setup.trial(stream, ask, variant)).key not in done]
        if left:
            runs.append(_Run(Session.start(backbone, variant.config, fps=setup.fps), left))
    if not runs:
        return
    for step in stream.steps(setup.fps, setup.frames_per_step):
        tokens = runs[0].session.embed(step.images, step.time_s)
        for run in runs:
            began = time.perf_counter()
            run.session.take([tokens], [step.time_s])
            _synchronise(backbone)
            run.busy_s += time.perf_counter() - began
        for run in runs:
            yield from _answer_due(backbone, run, setup.decoding, last=False)
        yield Watched(stream.name, runs[0].session.clock.stream_time_s, stream.length_s)
        runs = [run for run in runs if run.left]
        if should_stop() or not runs:
            return
    # The last sampling time may lie a fraction of a step before the end that the container names.
    for run in runs:
        yield from _answer_due(backbone, run, setup.decoding, last=True)


def _answer_due(backbone: Backbone, run: _Run, decoding: Decoding, *, last: bool) -> Iterator[Row]:
    clock = run.session.clock
    while run.left and (last or run.left[0][0].at_s <= clock.stream_time_s + 1e-6):
        _, trial = run.left.pop(0)
        if not run.warm:
            run.session.ask(trial.question, decoding)
            run.warm = True
        _synchronise(backbone)
        answer = run.session.ask(trial.question, decoding)
        yield Row(
            **{field.name: getattr(trial, field.name) for field in fields(trial)},
            asked_s=clock.stream_time_s,
            prediction=answer.text,
            correct=is_expected(answer.text, trial.expected),
            ttft_ms=round(answer.ttft_ms, 3),
            total_ms=round(answer.total_ms, 3),
            context_tokens=answer.context_tokens - len(backbone.prefix_ids),
            state_bytes=sum(run.session.memory.nbytes().values()),
            step_ms=round(1e3 * run.busy_s / clock.steps, 3),
            tokens_seen=clock.tokens_seen,
            device=str(backbone.device),
        )


def _synchronise(backbone: Backbone) -> None:
    if backbone.device.type == "cuda":
        torch.cuda.synchronize(backbone.device)
