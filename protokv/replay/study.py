"""A study: several streams, several memories, one file of results that a later run goes on with.

Owns which streams there are, what is planned of each, and what is left to do. Prints nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protokv.backbones.base import Backbone
from protokv.errors import ConfigError
from protokv.replay.questions import Question, load_questions
from protokv.replay.rows import Row, RowFile
from protokv.replay.runner import Variant, Watched, key_of, replay
from protokv.replay.schedule import Schedule, schedule
from protokv.replay.streams import FileStream, Pressure, Stream, WorldStream


@dataclass(frozen=True, slots=True)
class Study:
    """What is to be asked of what.

    Attributes:
        plans: streams with their schedules, in order.
        variants: the memories.
    """

    plans: Sequence[tuple[Stream, Schedule]]
    variants: Sequence[Variant]

    @property
    def dropped(self) -> Counter[str]:
        """How many questions were left out why, over all streams."""
        return sum((plan.dropped for _, plan in self.plans), Counter())

    def cost(self, backbone_fps: float, frames_per_step: int, done: Collection[Any] = ()) -> dict[str, Any]:
        """What a run would do: streams, questions, steps to encode under a memory each, answers to give."""
        left = [
            (stream, variant, [ask for ask in plan.asks if key_of(stream, ask, variant) not in done])
            for stream, plan in self.plans
            for variant in self.variants
        ]
        per_second = backbone_fps / frames_per_step
        # A pass ends with its last question.
        steps = sum(-(-asks[-1].at_s * per_second // 1) for _, _, asks in left if asks)
        return {
            "videos": len(self.plans),
            "memories": len(self.variants),
            "questions": sum(plan.questions for _, plan in self.plans),
            "dropped": dict(self.dropped),
            "steps": int(steps),
            "answers": sum(len(asks) for _, _, asks in left),
        }


def file_streams(sources: Sequence[str | Path], questions: str | Path) -> list[Stream]:
    """Video files with their questions. A question goes to the video that its row names; unnamed, to the only one.

    Raises:
        SourceError: a file is missing or cannot be read.
        ConfigError: a question names no video where there are several, or one that is not there.
    """
    rows = load_questions(questions)
    own: dict[str, list[Question]] = {str(source): [] for source in sources}
    by_name = {name: str(source) for source in sources for name in (Path(source).name, Path(source).stem, str(source))}
    for video, question in rows:
        if video is None and len(own) > 1:
            raise ConfigError(
                f"question {question.id} names no video, and there are {len(own)}",
                hint='add "video": "NAME" to its row',
            )
        if video is not None and video not in by_name:
            raise ConfigError(f"question {question.id} is about {video}, which is none of the sources")
        own[next(iter(own)) if video is None else by_name[video]].append(question)
    return [FileStream(source, found) for source, found in own.items()]


def world_streams(text: str, length_s: float, pressure: Pressure, evidence_s: int, per_type: int) -> list[Stream]:
    """Procedural streams from `SEED` or `SEED:COUNT`: COUNT streams with seeds SEED, SEED + 1 and so on.

    Raises:
        ConfigError: the text is neither, or a value is out of its range.
    """
    seed, colon, count = text.partition(":")
    if not seed.isdecimal() or (colon and not count.isdecimal()) or (colon and int(count) == 0):
        raise ConfigError(f"world: expected SEED or SEED:COUNT, got {text!r}", hint="for example --world 7:20")
    seeds = range(int(seed), int(seed) + (int(count) if colon else 1))
    return [WorldStream(s, round(length_s), pressure, evidence_s=evidence_s, per_type=per_type) for s in seeds]


def plan_study(
    streams: Sequence[Stream],
    variants: Sequence[Variant],
    delays_s: Sequence[float],
    *,
    intersection: bool = True,
    types: Collection[str] | None = None,
) -> Study:
    """Plan every stream.

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
    plans = [
        (stream, schedule(stream.questions, delays_s, stream.length_s, intersection=intersection, types=types))
        for stream in streams
    ]
    return Study(plans, variants)


def run(
    study: Study,
    backbone: Backbone,
    results: RowFile,
    *,
    fps: float | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[Row | Watched]:
    """Do what is left of a study; every row is in the file before it is yielded."""
    for stream, plan in study.plans:
        for event in replay(
            backbone, stream, plan, study.variants, fps=fps, done=results.rows.keys(), should_stop=should_stop
        ):
            if isinstance(event, Row):
                results.append(event)
            yield event
        if should_stop():
            return
