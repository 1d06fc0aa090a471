"""One pass over a stream serves all memories, questions and delays: steps are embedded once, asking is read-only.

Owns the order of things and the clock of the latencies: every answer is timed around the same boundary (question in,
first token, last token), after one question that is not counted. A benchmark's own query is asked before the first step
that holds a later frame; a delay behind evidence, when the step that holds it has been seen. Knows no files of results
and no tables.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import groupby
from typing import Any, Self

import torch

from protokv.backbones.base import Backbone, StepTokens
from protokv.config import MemoryConfig
from protokv.generate import Decoding
from protokv.replay.benchmarks import BENCHMARKS
from protokv.replay.rows import Row, Trial
from protokv.replay.schedule import SLACK_S, Ask, Schedule
from protokv.replay.scoring import score
from protokv.replay.streams import Stream
from protokv.session import Session

SHORT = Decoding(max_new_tokens=16)


@dataclass(frozen=True, slots=True)
class Variant:
    """A memory under test and the name that tables give it.

    Attributes:
        label: the name.
        config: the memory.
        blind: no step is ever shown to it: the answer from the text alone.
    """

    label: str
    config: MemoryConfig
    blind: bool = False

    @property
    def budget(self) -> int:
        """Visual tokens that a question may read."""
        return 0 if self.blind else self.config.budget

    def to_dict(self) -> dict[str, Any]:
        """What it is, plain JSON."""
        return {"kind": self.label} if self.blind else self.config.to_dict()


@dataclass(frozen=True, slots=True)
class Setup:
    """How streams are watched and questions answered: the same for all trials of a run.

    Attributes:
        model: which one, as states name it.
        fps: sampled frames per second.
        frames_per_step: sampled frames that make one step.
        decoding: of answers.
        frames: how frames are prepared, as the backbone says it.
        bare: the bare question is asked, and its answer is a text, where a benchmark would have a letter.
    """

    model: dict[str, str]
    fps: float
    frames_per_step: int
    decoding: Decoding = SHORT
    frames: dict[str, Any] = field(default_factory=dict)
    bare: bool = False

    @classmethod
    def of(
        cls, backbone: Backbone, *, fps: float | None = None, decoding: Decoding = SHORT, bare: bool = False
    ) -> Self:
        """The setup of a backbone, at its own rate where `fps` is None."""
        rate = backbone.default_fps if fps is None else fps
        frames = dict(backbone.settings)
        # Its digests say which model it is, whatever commit of the hub has it.
        model = {name: one for name, one in asdict(backbone.identity).items() if name != "revision"}
        return cls(model, float(rate), backbone.frames_per_step, decoding, frames, bare)

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
            budget=variant.budget,
            config=variant.to_dict(),
            stream=stream.facts | {"fps": self.fps, "frames_per_step": self.frames_per_step},
            model=self.model,
            decoding=asdict(self.decoding),
            dataset=question.dataset,
            prompt="" if self.bare else question.prompt,
            prompt_hash=self._prompt_hash(question.dataset),
            options=list(question.options),
            evidence_s=question.evidence_s,
            frames=self.frames,
        )

    def asked(self, stream: Stream, plan: Schedule, variants: Sequence[Variant]) -> list[Asked]:
        """All that is planned of a stream, memory by memory."""
        trials = [(variant, ask, self.trial(stream, ask, variant)) for variant in variants for ask in plan.asks]
        return [Asked(variant, ask, trial, trial.key) for variant, ask, trial in trials]

    def _prompt_hash(self, dataset: str) -> str:
        if not dataset:
            return ""
        return "bare" if self.bare else BENCHMARKS[dataset].prompt_hash


@dataclass(frozen=True, slots=True)
class Asked:
    """A question at a delay under a memory.

    Attributes:
        key: of the trial, which is long and made once.
    """

    variant: Variant
    ask: Ask
    trial: Trial
    key: str


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
    blind: bool
    waiting: deque[tuple[StepTokens, float]] = field(default_factory=deque)
    busy_s: float = 0.0
    warm: bool = False

    def watch(self, tokens: StepTokens, start_s: float) -> None:
        """Take a step; where only the last ones decide an answer, these wait until there is a question."""
        horizon = self.session.config.horizon
        self.waiting.append((tokens, start_s))
        if horizon is None:
            self.catch_up()
        elif len(self.waiting) > horizon:
            self.session.skip(*self.waiting.popleft())

    def catch_up(self) -> None:
        """Take the steps that wait."""
        began = time.perf_counter()
        while self.waiting:
            tokens, start_s = self.waiting.popleft()
            self.session.take([tokens], [start_s])
        synchronise(self.session.backbone)
        self.busy_s += time.perf_counter() - began

    def pop(self, until_s: float, *, causal: bool | None = None) -> list[Trial]:
        """Take what is to be asked until a stream time; causal queries, or the others, or all."""
        due = [(ask.at_s <= until_s and causal in (None, ask.question.causal), ask, trial) for ask, trial in self.left]
        self.left = [(ask, trial) for is_due, ask, trial in due if not is_due]
        return [trial for is_due, _, trial in due if is_due]


@dataclass(frozen=True, slots=True)
class _Moment:
    """Where the pass stands, for all runs alike: a blind one has no clock that moves."""

    stream_time_s: float = 0.0
    steps: int = 0
    tokens_seen: int = 0


def replay(
    backbone: Backbone,
    stream: Stream,
    asked: Iterable[Asked],
    setup: Setup,
    *,
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[Row | Watched]:
    """Watch a stream once and ask every memory what it is to be asked.

    Args:
        backbone: the model; all memories share it.
        stream: what to watch.
        asked: of this stream, memory by memory; one that is asked nothing is not run.
        setup: of this backbone.
        should_stop: asked after every step.

    Yields:
        A `Watched` after every step, and a `Row` for each answer.
    """
    runs = []
    for variant, own in groupby(asked, key=lambda one: one.variant):
        session = Session.start(backbone, variant.config, fps=setup.fps)
        runs.append(_Run(session, [(one.ask, one.trial) for one in own], variant.blind))
    if not runs:
        return
    now = _Moment()
    for step in stream.steps(setup.fps, setup.frames_per_step):
        newest_s = step.time_s + (setup.frames_per_step - 1) / setup.fps
        for run in runs:
            # Up to a frame's own time a query may not see it.
            yield from _answer(backbone, run, setup, now, run.pop(newest_s - 2 * SLACK_S, causal=True))
        runs = [run for run in runs if run.left]
        if not runs:
            return
        tokens = runs[0].session.embed(step.images, step.time_s)
        for run in runs:
            if not run.blind:
                run.watch(tokens, step.time_s)
        now = _Moment(
            step.time_s + setup.frames_per_step / setup.fps, now.steps + 1, now.tokens_seen + len(tokens.embeddings)
        )
        for run in runs:
            yield from _answer(backbone, run, setup, now, run.pop(now.stream_time_s + SLACK_S, causal=False))
        yield Watched(stream.name, now.stream_time_s, stream.length_s)
        runs = [run for run in runs if run.left]
        if should_stop() or not runs:
            return
    # The last sampling time may lie a fraction of a step before the end that the container names.
    for run in runs:
        yield from _answer(backbone, run, setup, now, run.pop(math.inf))


def _answer(backbone: Backbone, run: _Run, setup: Setup, now: _Moment, trials: Sequence[Trial]) -> Iterator[Row]:
    if trials:
        run.catch_up()
    for trial in trials:
        text = trial.prompt or trial.question
        if not run.warm:
            run.session.ask(text, setup.decoding)
            run.warm = True
        synchronise(backbone)
        answer = run.session.ask(text, setup.decoding)
        found = score(trial, answer.text)
        yield Row(
            **{field.name: getattr(trial, field.name) for field in fields(trial)},
            asked_s=now.stream_time_s,
            prediction=answer.text,
            correct=found.official,
            strict=found.strict if trial.dataset else None,
            judge=found.judge,
            ttft_ms=round(answer.ttft_ms, 3),
            total_ms=round(answer.total_ms, 3),
            context_tokens=max(0, answer.context_tokens - len(backbone.prefix_ids)),
            state_bytes=0 if run.blind else run.session.memory.bytes_held,
            step_ms=round(1e3 * run.busy_s / max(1, now.steps), 3),
            tokens_seen=now.tokens_seen,
            device=str(backbone.device),
        )


def synchronise(backbone: Backbone) -> None:
    """Wait until the device has done what it was told."""
    if backbone.device.type == "cuda":
        torch.cuda.synchronize(backbone.device)
