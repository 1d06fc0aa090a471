"""A plan (streams to watch, questions with their times, memories), its cost, and its run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from protokv.errors import ConfigError, SourceError, suggest_name
from protokv.replay.memories import MemoryVariant
from protokv.replay.questions import (
    ALL_QUESTION_TYPES,
    DELAY_LADDER_S,
    fit_delays,
    plan_asks,
)
from protokv.replay.rows import AnswerRow, AnswerRowFile, ReplayTrial
from protokv.replay.runner import PlannedAnswer, ReplayProgress, TrialSetup, replay_stream
from protokv.replay.streams import ReplayStream
from protokv.texts import JsonObject
from protokv.video.source import ShouldStop, never_stop


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """What to ask of which stream, when, under how many memories, and how."""

    # every stream with every question at every delay under every memory
    answers: Sequence[tuple[ReplayStream, Sequence[PlannedAnswer]]]
    dropped: Counter[str]  # reason -> number of questions left out for it, over all streams
    memories: int
    setup: TrialSetup

    @property
    def trials(self) -> dict[str, ReplayTrial]:
        """Key -> trial, of everything that is asked."""
        return {one.key: one.trial for _, planned in self.answers for one in planned}

    def cost(self, done: Collection[str] = ()) -> JsonObject:
        """Return the size of a run: `hours` of video up to the last questions, and `answers` that
        are not done.
        """
        trials = self.trials
        last_s = (max((one.ask.at_s for one in own), default=0.0) for _, own in self.answers)
        return {
            "videos": len(self.answers),
            "memories": self.memories,
            "questions": len({(one.video, one.question_id) for one in trials.values()}),
            "dropped": dict(self.dropped),
            "hours": round(sum(last_s) / 3600, 2),
            "answers": len(trials.keys() - set(done)),
        }


def make_replay_plan(
    streams: Sequence[ReplayStream],
    variants: Sequence[MemoryVariant],
    delays_s: Sequence[float] | None,
    setup: TrialSetup,
    *,
    wanted_s: Sequence[float] = DELAY_LADDER_S,
    intersection: bool = True,
    types: Collection[str] | None = None,
) -> ReplayPlan:
    """Schedule every stream; see `plan_asks` for the arguments. Without delays, fit `wanted_s` to
    the streams.

    ConfigError: two memories have the same name and budget, or two streams the same name; no
    question has one of the types.
    """
    names = Counter(
        [f"memory {one.label} at {one.budget}" for one in variants]
        + [f"video {s.name}" for s in streams]
    )
    if twice := next((name for name, n in names.items() if n > 1), None):
        raise ConfigError(f"{twice} is there twice", hint="results could not be told apart")
    known = {question.type for stream in streams for question in stream.questions} - {""}
    if types and known.isdisjoint(types) and known and ALL_QUESTION_TYPES not in types:
        raise ConfigError(
            f"no question has the type {', '.join(types)}",
            hint=suggest_name(next(iter(types)), sorted(known), others="or all"),
        )
    if delays_s is None:
        rooms = [
            stream.length_s - question.reference_s
            for stream in streams
            for question in stream.questions
        ]
        delays_s = fit_delays(rooms, wanted_s)
    dropped = Counter[str]()
    answers = []
    for stream in streams:
        asks = plan_asks(
            stream.questions,
            delays_s,
            stream.length_s,
            dropped,
            intersection=intersection,
            types=types,
        )
        answers.append((stream, setup.plan_answers(stream, asks, variants)))
    return ReplayPlan(answers, dropped, len(variants), setup)


@dataclass(frozen=True, slots=True)
class ReplayFailure:
    """A video that could not be read to its end, and why; answers given before are kept."""

    video: str
    error: SourceError


def run_replay_plan(
    plan: ReplayPlan,
    results: AnswerRowFile,
    *,
    should_stop: ShouldStop = never_stop,
) -> Iterator[AnswerRow | ReplayProgress | ReplayFailure]:
    """Run what is not done in `results` yet; every row is in the file before it is yielded.

    After a video that cannot be read comes the next one. `should_stop` is called after every step.
    ConfigError: the file holds results of another study.
    """
    results.check(plan.trials.values())
    for stream, planned in plan.answers:
        left = [one for one in planned if one.key not in results.rows]
        try:
            for event in replay_stream(stream, left, plan.setup, should_stop=should_stop):
                if isinstance(event, AnswerRow):
                    results.append(event)
                yield event
        except SourceError as error:
            yield ReplayFailure(stream.name, error)
        if should_stop():
            return
