"""The pass: watch a stream once, and ask every question at each delay under every memory.

All memories share the embedding of a step. Streams of one length may be watched together (`protokv.replay.batched`),
which is several times as fast with a small model and gives the same answers. Latencies run from the question to the
first and the last token, after one answer that is not counted. A benchmark's own query is asked before the first step
with a later frame; a delayed one after the step that reaches its time.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

import torch

from protokv.core.backbone import Backbone
from protokv.core.decoding import Decoding
from protokv.core.session import Session
from protokv.core.step import StepTokens
from protokv.replay.batched import BatchedStreams
from protokv.replay.benchmarks import BENCHMARKS
from protokv.replay.benchmarks.base import Score
from protokv.replay.benchmarks.choices import named_option
from protokv.replay.memories import Variant
from protokv.replay.questions import is_expected
from protokv.replay.rows import Row, Trial
from protokv.replay.schedule import SLACK_S, Ask, Schedule
from protokv.replay.streams import Stream

SHORT = Decoding(max_new_tokens=16)


@dataclass(frozen=True, slots=True)
class Setup:
    """How streams are watched and questions answered, in all trials of a run.

    Attributes:
        model: its identity, as states have it.
        fps: sampled frames per second.
        frames_per_step: sampled frames of one step.
        decoding: of answers.
        frames: the backbone's settings for frames.
        bare: ask the question without the benchmark's wording; the answer is a text and no letter.
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
        """Return the setup of a backbone, at its own rate if `fps` is None."""
        rate = backbone.default_fps if fps is None else fps
        frames = dict(backbone.settings)
        # The digests of the weights identify the model, not the commit of the hub.
        model = {name: one for name, one in asdict(backbone.identity).items() if name != "revision"}
        return cls(model, float(rate), backbone.frames_per_step, decoding, frames, bare)

    def trial(self, stream: Stream, ask: Ask, variant: Variant) -> Trial:
        """Return the trial of one ask under one memory."""
        question = ask.question
        prompt_hash = ""
        if question.dataset:
            prompt_hash = "bare" if self.bare else BENCHMARKS[question.dataset].prompt_hash
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
            prompt_hash=prompt_hash,
            options=list(question.options),
            evidence_s=question.evidence_s,
            frames=self.frames,
        )

    def asked(self, stream: Stream, plan: Schedule, variants: Sequence[Variant]) -> list[Asked]:
        """Return everything that is asked about a stream, memory by memory."""
        trials = [(variant, ask, self.trial(stream, ask, variant)) for variant in variants for ask in plan.asks]
        return [Asked(variant, ask, trial, trial.key) for variant, ask, trial in trials]


@dataclass(frozen=True, slots=True)
class Asked:
    """A question at a delay under a memory. The `key` of the trial is costly and made once."""

    variant: Variant
    ask: Ask
    trial: Trial
    key: str


@dataclass(frozen=True, slots=True)
class Watched:
    """Progress, after every step."""

    video: str
    stream_time_s: float
    length_s: float


@dataclass(slots=True)
class _Run:
    """One stream under one memory."""

    session: Session
    left: list[tuple[Ask, Trial]]
    warm: bool = False

    def pop(self, until_s: float, *, causal: bool | None = None) -> list[Trial]:
        """Remove and return the trials due at a stream time: causal queries, the others, or all."""
        due = [(ask.at_s <= until_s and causal in (None, ask.question.causal), ask, trial) for ask, trial in self.left]
        self.left = [(ask, trial) for is_due, ask, trial in due if not is_due]
        return [trial for is_due, _, trial in due if is_due]


@dataclass(slots=True)
class _Band:
    """All streams under one memory, and the seconds of its updates."""

    memory: BatchedStreams
    runs: list[_Run]
    variant: Variant
    waiting: deque[tuple[list[StepTokens], float]] = field(default_factory=deque)
    busy_s: float = 0.0

    @property
    def is_done(self) -> bool:
        """True if nothing is left to ask."""
        return not any(run.left for run in self.runs)

    def watch(self, tokens: list[StepTokens], start_s: float) -> None:
        """Take a step of each stream; keep it waiting if only the last steps before a question matter."""
        if self.variant.blind:
            return
        # Layers without full attention carry something of every step.
        carried = self.runs[0].session.backbone.carried is not None
        horizon = None if carried else self.variant.config.horizon
        self.waiting.append((tokens, start_s))
        if horizon is None:
            self.catch_up()
        elif len(self.waiting) > horizon:
            self.memory.skip(*self.waiting.popleft())

    def catch_up(self) -> None:
        """Take the waiting steps."""
        began = time.perf_counter()
        while self.waiting:
            self.memory.take(*self.waiting.popleft())
        synchronise(self.runs[0].session.backbone)
        self.busy_s += time.perf_counter() - began


@dataclass(frozen=True, slots=True)
class _Moment:
    """Progress of the pass, for all runs; the clock of a blind one does not move."""

    stream_time_s: float = 0.0
    steps: int = 0
    tokens_seen: int = 0


def replay(
    backbone: Backbone,
    streams: Sequence[tuple[Stream, Sequence[Asked]]],
    setup: Setup,
    *,
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[Row | Watched]:
    """Watch one stream, or several together, and ask every question under every memory.

    Args:
        backbone: the model; all memories share it.
        streams: of one length, each with its trials, memory by memory; a memory without a trial is not run.
        setup: of this backbone.
        should_stop: called after every step.

    Yields:
        A `Watched` after every step, with the name of the first stream, and a `Row` for each answer.
    """
    asked: dict[Variant, list[list[tuple[Ask, Trial]]]] = {}
    for number, (_, own) in enumerate(streams):
        for one in own:
            asked.setdefault(one.variant, [[] for _ in streams])[number].append((one.ask, one.trial))
    bands = []
    for variant, left in asked.items():
        memory = BatchedStreams(backbone, variant.config, len(streams), fps=setup.fps)
        bands.append(_Band(memory, [_Run(*pair) for pair in zip(memory.sessions, left, strict=True)], variant))
    if not bands:
        return
    now, (first, _) = _Moment(), streams[0]
    for steps in zip(*(stream.steps(setup.fps, setup.frames_per_step) for stream, _ in streams), strict=True):
        start_s = steps[0].time_s
        newest_s = start_s + (setup.frames_per_step - 1) / setup.fps
        # A query at the time of a frame does not see this frame.
        yield from _answer(backbone, bands, setup, now, newest_s - 2 * SLACK_S, causal=True)
        bands = [band for band in bands if not band.is_done]
        if not bands:
            return
        end_s = start_s + setup.frames_per_step / setup.fps
        embed = bands[0].runs[0].session.embed
        tokens = [
            embed(step.images, step.time_s, stream.words(step.time_s, end_s))
            for (stream, _), step in zip(streams, steps, strict=True)
        ]
        for band in bands:
            band.watch(tokens, start_s)
        seen = now.tokens_seen + len(tokens[0].embeddings)
        now = _Moment(end_s, now.steps + 1, seen)
        yield from _answer(backbone, bands, setup, now, now.stream_time_s + SLACK_S, causal=False)
        yield Watched(first.name, now.stream_time_s, first.length_s)
        bands = [band for band in bands if not band.is_done]
        if should_stop() or not bands:
            return
    # The last sampling time may lie a fraction of a step before the end that the container names.
    yield from _answer(backbone, bands, setup, now, math.inf)


def _answer(
    backbone: Backbone,
    bands: Sequence[_Band],
    setup: Setup,
    now: _Moment,
    until_s: float,
    *,
    causal: bool | None = None,
) -> Iterator[Row]:
    for band in bands:
        for number, run in enumerate(band.runs):
            trials = run.pop(until_s, causal=causal)
            if trials:
                band.catch_up()
            for trial in trials:
                yield _ask(backbone, band, number, setup, now, trial)


def _ask(backbone: Backbone, band: _Band, number: int, setup: Setup, now: _Moment, trial: Trial) -> Row:
    run, text = band.runs[number], trial.prompt or trial.question
    if not run.warm:
        run.session.ask(text, setup.decoding)
        run.warm = True
    synchronise(backbone)
    answer = run.session.ask(text, setup.decoding)
    found = score(trial, answer.text)
    return Row(
        **{field.name: getattr(trial, field.name) for field in fields(trial)},
        asked_s=now.stream_time_s,
        prediction=answer.text,
        correct=found.official,
        strict=found.strict if trial.dataset else None,
        judge=found.judge,
        ttft_ms=round(answer.ttft_ms, 3),
        total_ms=round(answer.total_ms, 3),
        context_tokens=max(0, answer.context_tokens - len(backbone.prefix_ids)),
        state_bytes=0 if band.variant.blind else band.memory.bytes_held(number),
        step_ms=round(1e3 * band.busy_s / max(1, now.steps) / len(band.runs), 3),
        tokens_seen=now.tokens_seen,
        device=str(backbone.device),
        batched=len(band.runs),
    )


def score(trial: Trial, prediction: str) -> Score:
    """Score an answer when it is given. The answer to a bare question spells out an option instead of its letter."""
    benchmark, is_bare = BENCHMARKS.get(trial.dataset), trial.prompt_hash == "bare"
    if is_bare and trial.options:
        right = named_option(prediction, trial.options) == trial.expected
        return Score(right, right, "the option that the answer spells out")
    if benchmark is None or (is_bare and not benchmark.open_ended):
        right = is_expected(prediction, trial.expected)
        return Score(right, right, "exact text" if is_bare else "")
    return benchmark.score(prediction, trial.expected, trial.type, trial.options)


def synchronise(backbone: Backbone) -> None:
    """Wait until the device has done its work."""
    if backbone.device.type == "cuda":
        torch.cuda.synchronize(backbone.device)
