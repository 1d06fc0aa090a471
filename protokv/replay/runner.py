"""The pass: watch a stream once, and ask every question at each delay under every memory.

All memories share the embedding of a step and one forward (`protokv.stream.taking`), and what is
asked at one time is answered together (`protokv.stream.together`). Latencies run from the questions
to the first and the last token. A benchmark's own query is asked before the first step with a later
frame; a delayed one after the step that reaches its time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Self

import torch

from protokv.core.backbone import Backbone
from protokv.core.decoding import Decoding
from protokv.replay.benchmarks import BENCHMARKS
from protokv.replay.benchmarks.base import Benchmark
from protokv.replay.memories import MemoryVariant
from protokv.replay.questions import (
    ASK_SLACK_S,
    DelayedQuestion,
    is_expected_answer,
)
from protokv.replay.rows import AnswerRow, ReplayTrial
from protokv.replay.streams import ReplayStream
from protokv.stream.answer import Answer
from protokv.stream.session import Session
from protokv.stream.taking import DueSteps, take_together
from protokv.stream.together import MOST_TOGETHER, AskedQuestion, ask_together
from protokv.timings import Timings
from protokv.video.source import ShouldStop, never_stop
from protokv.words.transcript import Transcript

_SHORT_ANSWER = Decoding(max_new_tokens=16)
# The part of a row on decoding; a replay uses nothing else.
_DECODING = ("max_new_tokens", "temperature", "top_p", "top_k", "repetition_penalty", "seed")


@dataclass(frozen=True, slots=True)
class TrialSetup:
    """How streams are watched and questions answered, in all trials of a run."""

    backbone: Backbone
    fps: float  # sampled frames per second
    decoding: Decoding = _SHORT_ANSWER
    # the most questions that are answered together, and the most memories that share a forward
    at_once: int = MOST_TOGETHER

    @classmethod
    def of(
        cls,
        backbone: Backbone,
        benchmark: Benchmark | None = None,
        *,
        fps: float | None = None,
        at_once: int = MOST_TOGETHER,
    ) -> Self:
        """Return the setup of a backbone: unless `fps` is given, at the rate of the benchmark, or
        at its own.
        """
        decoding = _SHORT_ANSWER
        if benchmark is not None:
            fps = fps or benchmark.fps
            decoding = Decoding(max_new_tokens=benchmark.max_new_tokens)
        rate = backbone.default_fps if fps is None else fps
        return cls(backbone, float(rate), decoding, at_once)

    def plan_answers(
        self,
        stream: ReplayStream,
        asks: Sequence[DelayedQuestion],
        variants: Sequence[MemoryVariant],
    ) -> list[PlannedAnswer]:
        """Return everything that is asked about a stream, memory by memory."""
        backbone = self.backbone
        # The digests of the weights identify the model, not the commit of the hub.
        model = {name: one for name, one in asdict(backbone.identity).items() if name != "revision"}
        sampling = {"fps": self.fps, "frames_per_step": backbone.frames_per_step}
        answers = []
        for variant in variants:
            for ask in asks:
                question = ask.question
                trial = ReplayTrial(
                    video=stream.name,
                    question_id=question.id,
                    question=question.text,
                    type=question.type,
                    expected=question.answer,
                    reference=question.reference,
                    reference_s=question.reference_s,
                    delay_s=float(ask.delay_s),
                    memory=variant.label,
                    budget=variant.budget,
                    config=variant.to_dict(),
                    stream=stream.facts | sampling,
                    model=model,
                    decoding={name: getattr(self.decoding, name) for name in _DECODING},
                    dataset=question.dataset,
                    prompt=question.prompt,
                    prompt_hash=BENCHMARKS[question.dataset].prompt_hash
                    if question.dataset
                    else "",
                    frames=dict(backbone.settings),
                )
                answers.append(PlannedAnswer(variant, ask, trial, trial.key))
        return answers


@dataclass(frozen=True, slots=True, eq=False)
class PlannedAnswer:
    """A question at a delay under a memory. The `key` of the trial is costly and made once."""

    variant: MemoryVariant
    ask: DelayedQuestion
    trial: ReplayTrial
    key: str


@dataclass(frozen=True, slots=True)
class ReplayProgress:
    """How much of a stream was watched, after every step; a blind memory's own clock does not
    move.
    """

    video: str
    length_s: float
    stream_time_s: float = 0.0
    steps: int = 0
    tokens_seen: int = 0


@dataclass(slots=True)
class _Run:
    """The stream under one memory, what is left to ask, and the seconds that its steps took."""

    session: Session
    variant: MemoryVariant
    left: list[PlannedAnswer]
    timings: Timings = field(default_factory=Timings)

    def __post_init__(self) -> None:
        self.session.timings = self.timings
        self.timings.synchronise = partial(_synchronise, self.session.backbone)

    def take_due(self, until_s: float, causal: bool | None) -> list[PlannedAnswer]:
        """Return what is due at a stream time: causal queries, the others, or all."""
        due = [
            one
            for one in self.left
            if one.ask.at_s <= until_s and causal in (None, one.ask.question.causal)
        ]
        self.left = [one for one in self.left if one not in due]
        return due

    def make_row(
        self, trial: ReplayTrial, answer: Answer, now: ReplayProgress, at_once: int
    ) -> AnswerRow:
        """Return the row of an answer that was one of so many at once."""
        session = self.session
        benchmark = BENCHMARKS.get(trial.dataset)
        return AnswerRow(
            **{field.name: getattr(trial, field.name) for field in fields(trial)},
            asked_s=now.stream_time_s,
            prediction=answer.text,
            correct=is_expected_answer(answer.text, trial.expected)
            if benchmark is None
            else benchmark.is_right(answer.text, trial.expected, trial.type),
            judge="" if benchmark is None else benchmark.judge,
            ttft_ms=round(answer.ttft_ms, 3),
            total_ms=round(answer.total_ms, 3),
            context_tokens=max(0, answer.context_tokens - len(session.backbone.prefix_ids)),
            state_bytes=0 if self.variant.blind else session.state_bytes,
            step_ms=round(1e3 * sum(self.timings.seconds.values()) / max(1, now.steps), 3),
            tokens_seen=now.tokens_seen,
            device=str(session.backbone.device),
            mean_logprob=round(answer.mean_logprob, 6),
            at_once=at_once,
        )


def _ask_due(
    due: Sequence[tuple[_Run, PlannedAnswer]], now: ReplayProgress, setup: TrialSetup
) -> Iterator[AnswerRow]:
    """Ask what is due, and yield the rows in this order."""
    asked = [AskedQuestion(run.session, one.trial.asked, setup.decoding) for run, one in due]
    _synchronise(setup.backbone)
    answers = ask_together(asked, setup.at_once)
    together = min(setup.at_once, sum(one.session.joins for one in asked))
    for (run, one), answer in zip(due, answers, strict=True):
        yield run.make_row(one.trial, answer, now, together if run.session.joins else 1)


def replay_stream(
    stream: ReplayStream,
    asked: Sequence[PlannedAnswer],
    setup: TrialSetup,
    *,
    should_stop: ShouldStop = never_stop,
) -> Iterator[AnswerRow | ReplayProgress]:
    """Watch a stream once, and ask its questions under every memory; a memory without a question is
    not run.

    Yields a `ReplayProgress` after every step, when `should_stop` is called, and an `AnswerRow` for
    each answer.
    """
    left: dict[MemoryVariant, list[PlannedAnswer]] = {}
    for one in asked:
        left.setdefault(one.variant, []).append(one)
    runs = [
        _Run(
            Session.start(
                setup.backbone, variant.config, fps=setup.fps, attachments=[Transcript()]
            ),
            variant,
            own,
        )
        for variant, own in left.items()
    ]
    now = ReplayProgress(stream.name, stream.length_s)

    def answer(until_s: float, causal: bool | None = None) -> Iterator[AnswerRow]:
        due = [(run, one) for run in runs for one in run.take_due(until_s, causal)]
        yield from _ask_due(due, now, setup)
        runs[:] = [run for run in runs if run.left]

    frames = setup.backbone.frames_per_step
    for step in stream.steps(setup.fps, frames) if runs else ():
        newest_s = step.time_s + (frames - 1) / setup.fps
        # A query at the time of a frame does not see this frame.
        yield from answer(newest_s - 2 * ASK_SLACK_S, causal=True)
        if not runs:
            return
        end_s = step.time_s + frames / setup.fps
        tokens = runs[0].session.embed(step.images, step.time_s, stream.words(step.time_s, end_s))
        sees = [run.session for run in runs if not run.variant.blind]
        due = [DueSteps(session, [tokens], [step.time_s]) for session in sees]
        for error in take_together(due, setup.at_once).values():
            raise error
        seen = now.tokens_seen + len(tokens.embeddings)
        now = ReplayProgress(stream.name, stream.length_s, end_s, now.steps + 1, seen)
        yield from answer(end_s + ASK_SLACK_S, causal=False)
        yield now
        if should_stop() or not runs:
            return
    # The last sampling time may lie a fraction of a step before the end that the container names.
    yield from answer(math.inf)


def _synchronise(backbone: Backbone) -> None:
    if backbone.device.type == "cuda":
        torch.cuda.synchronize(backbone.device)
