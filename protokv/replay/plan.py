"""A plan: which streams are watched, what is asked of each and when, and under which memories.

Owns the plan, what it costs, and running what is left of it. Knows no file of questions and no command line.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any

from protokv.backbones.base import Backbone
from protokv.errors import ConfigError, SourceError
from protokv.replay.rows import Row, RowFile, Trial
from protokv.replay.runner import Asked, Setup, Variant, Watched, replay
from protokv.replay.schedule import LADDER, Schedule, fit_delays, schedule
from protokv.replay.streams import Stream, WorldStream


@dataclass(frozen=True)
class Plan:
    """What is to be asked of what.

    Attributes:
        streams: each with its schedule, in order.
        variants: the memories.
        setup: how streams are watched and questions answered.
    """

    streams: Sequence[tuple[Stream, Schedule]]
    variants: Sequence[Variant]
    setup: Setup

    @property
    def dropped(self) -> Counter[str]:
        """Reason -> questions left out for it, over all streams."""
        return sum((asked.dropped for _, asked in self.streams), Counter())

    @cached_property
    def asked(self) -> list[tuple[Stream, list[Asked]]]:
        """Of each stream, every question at every delay under every memory."""
        return [(stream, self.setup.asked(stream, asked, self.variants)) for stream, asked in self.streams]

    @property
    def trials(self) -> dict[str, Trial]:
        """All that is asked, by its key."""
        return {one.key: one.trial for _, asked in self.asked for one in asked}

    @property
    def hours(self) -> float:
        """Hours of video up to the last question about each."""
        return sum(max((ask.at_s for ask in asked.asks), default=0.0) for _, asked in self.streams) / 3600

    def cost(self, done: Collection[str] = ()) -> dict[str, Any]:
        """What a run would do: streams, questions, hours of video up to the last of them, steps to encode (summed over
        memories), steps to embed (shared by them) and answers to give."""
        steps_per_second = self.setup.fps / self.setup.frames_per_step
        steps = embedded = answers = 0
        for _, asked in self.asked:
            left = [one for one in asked if one.key not in done]
            answers += len(left)
            last = 0
            for variant, own in groupby((one for one in left if not one.variant.blind), key=lambda one: one.variant):
                ends = sorted({math.ceil(one.ask.at_s * steps_per_second) for one in own})
                # A pass ends with its last question; between two of them no more is encoded than the next depends on.
                steps += sum(min(b - a, variant.config.horizon or b - a) for a, b in pairwise([0, *ends]))
                last = max(last, ends[-1])
            embedded += last
        return {
            "videos": len(self.streams),
            "memories": len(self.variants),
            "questions": sum(asked.questions for _, asked in self.streams),
            "dropped": dict(self.dropped),
            "hours": round(self.hours, 2),
            "steps": steps,
            "embedded": embedded,
            "answers": answers,
        }


def make_plan(
    streams: Sequence[Stream],
    variants: Sequence[Variant],
    delays_s: Sequence[float] | None,
    setup: Setup,
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
    return Plan(scheduled, variants, setup)


def run(
    plan: Plan,
    backbone: Backbone,
    results: RowFile,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    strict: bool = True,
    batched: int = 1,
) -> Iterator[Row | Watched | Unread]:
    """Do what is left of a plan; every row is in the file before it is yielded.

    Args:
        plan: what to do.
        backbone: the model that its setup is of.
        results: where rows go, and what is done already.
        should_stop: asked after every step.
        strict: a video that turns out unreadable ends the run; otherwise it is told, and the next one is taken.
        batched: streams to watch at a time, where these follow each other, are procedural and of one length.

    Raises:
        ConfigError: the file holds results of another study.
        SourceError: a video cannot be read, with `strict`.
    """
    results.check(plan.trials.values())
    for group in _group(plan.asked, batched):
        left = [(stream, [one for one in asked if one.key not in results.rows]) for stream, asked in group]
        try:
            for event in replay(backbone, left, plan.setup, should_stop=should_stop):
                if isinstance(event, Row):
                    results.append(event)
                yield event
        except SourceError as error:
            if strict:
                raise
            yield Unread(group[0][0].name, error.message)
        if should_stop():
            return


def _group(asked: Sequence[tuple[Stream, list[Asked]]], most: int) -> Iterator[list[tuple[Stream, list[Asked]]]]:
    """Procedural streams of one length that follow each other, so many at a time; all others by themselves."""

    def length_of(one: tuple[Stream, list[Asked]]) -> tuple[float, bool]:
        return one[0].length_s, isinstance(one[0], WorldStream)

    for (_, procedural), alike in groupby(asked, key=length_of):
        found = list(alike)
        size = most if procedural else 1
        for start in range(0, len(found), size):
            yield found[start : start + size]


@dataclass(frozen=True, slots=True)
class Unread:
    """A video that could not be read to its end; what was answered before is kept."""

    video: str
    why: str
