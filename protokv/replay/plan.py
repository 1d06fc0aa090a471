"""A plan: which streams are watched, what is asked of each and when, and under which memories.

Owns the plan, what it costs, and running what is left of it. Knows no file of questions and no command line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from protokv.backbones.base import Backbone
from protokv.errors import ConfigError
from protokv.replay.rows import Row, RowFile
from protokv.replay.runner import Variant, Watched, key_of, replay
from protokv.replay.schedule import Schedule, schedule
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

    def cost(self, fps: float, frames_per_step: int, done: Collection[Any] = ()) -> dict[str, Any]:
        """What a run would do: streams, questions, steps to encode (summed over memories) and answers to give."""
        left = [
            (stream, variant, [ask for ask in asked.asks if key_of(stream, ask, variant) not in done])
            for stream, asked in self.streams
            for variant in self.variants
        ]
        steps_per_second = fps / frames_per_step
        # A pass ends with its last question.
        steps = sum(-(-asks[-1].at_s * steps_per_second // 1) for _, _, asks in left if asks)
        return {
            "videos": len(self.streams),
            "memories": len(self.variants),
            "questions": sum(asked.questions for _, asked in self.streams),
            "dropped": dict(self.dropped),
            "steps": int(steps),
            "answers": sum(len(asks) for _, _, asks in left),
        }


def make_plan(
    streams: Sequence[Stream],
    variants: Sequence[Variant],
    delays_s: Sequence[float],
    *,
    intersection: bool = True,
    types: Collection[str] | None = None,
) -> Plan:
    """Schedule every stream; see `schedule` for the arguments.

    Raises:
        ConfigError: two memories have the same name and budget, or two streams the same name.
    """
    for what, names in (
        ("memory", [f"{variant.label} at {variant.config.budget}" for variant in variants]),
        ("video", [stream.name for stream in streams]),
    ):
        twice = [name for name, n in Counter(names).items() if n > 1]
        if twice:
            raise ConfigError(f"{what} {twice[0]} is there twice", hint="results could not be told apart")
    scheduled = [
        (stream, schedule(stream.questions, delays_s, stream.length_s, intersection=intersection, types=types))
        for stream in streams
    ]
    return Plan(scheduled, variants)


def run(
    plan: Plan,
    backbone: Backbone,
    results: RowFile,
    *,
    fps: float | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[Row | Watched]:
    """Do what is left of a plan; every row is in the file before it is yielded."""
    for stream, asked in plan.streams:
        for event in replay(
            backbone, stream, asked, plan.variants, fps=fps, done=results.rows.keys(), should_stop=should_stop
        ):
            if isinstance(event, Row):
                results.append(event)
            yield event
        if should_stop():
            return
