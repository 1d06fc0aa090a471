"""A plan: which streams are watched, what is asked of each and when, and under which memories.

Owns the plan, what it costs, and running what is left of it. Knows no file of questions and no command line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from protokv.backbones.base import Backbone
from protokv.errors import ConfigError, SourceError
from protokv.replay.rows import Row, RowFile, Trial
from protokv.replay.runner import Setup, Variant, Watched, replay
from protokv.replay.schedule import LADDER, Schedule, fit_delays, schedule
from protokv.replay.streams import Stream


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be asked of what.

    Attributes:
        streams: each with its schedule, in order.
        variants: the memories.
    """

    streams: Sequence[tuple[Stream, Schedule]]
    variants: Sequence[Variant]

    @property
    def dropped(self) -> Counter[str]:
        """Reason -> questions left out for it, over all streams."""
        return sum((asked.dropped for _, asked in self.streams), Counter())

    def trials(self, setup: Setup) -> list[Trial]:
        """Every question at every delay under every memory."""
        return [
            setup.trial(stream, ask, variant)
            for stream, asked in self.streams
            for variant in self.variants
            for ask in asked.asks
        ]

    @property
    def hours(self) -> float:
        """Hours of video up to the last question about each."""
        return sum(max((ask.at_s for ask in asked.asks), default=0.0) for _, asked in self.streams) / 3600

    def cost(self, setup: Setup, done: Collection[str] = ()) -> dict[str, Any]:
        """What a run would do: streams, questions, hours of video up to the last of them, steps to encode (summed over
        memories), steps to embed (shared by them) and answers to give."""
        left = {
            (stream.name, i): [ask for ask in asked.asks if setup.trial(stream, ask, variant).key not in done]
            for stream, asked in self.streams
            for i, variant in enumerate(self.variants)
        }
        steps_per_second = setup.fps / setup.frames_per_step
        # A pass ends with its last question.
        steps = {
            key: -(-asks[-1].at_s * steps_per_second // 1)
            for key, asks in left.items()
            if asks and not self.variants[key[1]].blind
        }
        embedded: dict[str, float] = {}
        for (name, _), n in steps.items():
            embedded[name] = max(n, embedded.get(name, 0))
        return {
            "videos": len(self.streams),
            "memories": len(self.variants),
            "questions": sum(asked.questions for _, asked in self.streams),
            "dropped": dict(self.dropped),
            "hours": round(self.hours, 2),
            "steps": int(sum(steps.values())),
            "embedded": int(sum(embedded.values())),
            "answers": sum(map(len, left.values())),
        }


def make_plan(
    streams: Sequence[Stream],
    variants: Sequence[Variant],
    delays_s: Sequence[float] | None,
    *,
    wanted_s: Sequence[float] = LADDER,
    intersection: bool = True,
    types: Collection[str] | None = None,
) -> Plan:
    """Schedule every stream; see `schedule` for the arguments. Without delays, `wanted_s` are fitted to the streams.

    Raises:
        ConfigError: two memories have the same name and budget, or two streams the same name.
    """
    for what, names in (
        ("memory", [f"{variant.label} at {variant.budget}" for variant in variants]),
        ("video", [stream.name for stream in streams]),
    ):
        twice = [name for name, n in Counter(names).items() if n > 1]
        if twice:
            raise ConfigError(f"{what} {twice[0]} is there twice", hint="results could not be told apart")
    if delays_s is None:
        rooms = [stream.length_s - question.reference_s for stream in streams for question in stream.questions]
        delays_s = fit_delays(rooms, wanted_s)
    scheduled = [
        (stream, schedule(stream.questions, delays_s, stream.length_s, intersection=intersection, types=types))
        for stream in streams
    ]
    return Plan(scheduled, variants)


def run(
    plan: Plan,
    backbone: Backbone,
    setup: Setup,
    results: RowFile,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    strict: bool = True,
) -> Iterator[Row | Watched | Unread]:
    """Do what is left of a plan; every row is in the file before it is yielded.

    Args:
        plan: what to do.
        backbone: the model.
        setup: of this backbone.
        results: where rows go, and what is done already.
        should_stop: asked after every step.
        strict: a video that turns out unreadable ends the run; otherwise it is told, and the next one is taken.

    Raises:
        ConfigError: the file holds results of another study.
        SourceError: a video cannot be read, with `strict`.
    """
    results.check(plan.trials(setup))
    for stream, asked in plan.streams:
        try:
            for event in replay(
                backbone, stream, asked, plan.variants, setup, done=results.rows.keys(), should_stop=should_stop
            ):
                if isinstance(event, Row):
                    results.append(event)
                yield event
        except SourceError as error:
            if strict:
                raise
            yield Unread(stream.name, error.message)
        if should_stop():
            return


@dataclass(frozen=True, slots=True)
class Unread:
    """A video that could not be read to its end; what was answered before is kept."""

    video: str
    why: str
