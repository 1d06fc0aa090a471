"""Streams to replay: video files with questions, and procedural worlds whose evidence times are known.

A world needs no file: its frames are drawn when they are sampled, and its questions are those about the evidence whose
truth never changes, whatever comes later. Time (how long ago the evidence was), pressure (how much happens around it)
and where in the stream it lies are parameters of their own. Knows no memory and no model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from protokv.errors import ConfigError, SourceUnreadable
from protokv.mini import WORLD_MARK
from protokv.mini.phrases import TYPES
from protokv.mini.questions import find_facts, phrase, pick
from protokv.mini.world import Backdrop, World, WorldConfig
from protokv.replay.placement import Before, place_evidence
from protokv.replay.question_types import find_type
from protokv.replay.questions import Question, load_questions
from protokv.video import Step, open_source, read_steps
from protokv.video.sampling import sample, steps
from protokv.video.source import Frame


class Stream(ABC):
    """Something to watch, and what to ask about it.

    Attributes:
        name: as it stands in the results.
        length_s: seconds of stream time.
        facts: what decides its frames, plain JSON.
        questions: about it.
        comment: what its file says of itself; see `protokv.watched.is_beyond`.
    """

    name: str
    length_s: float
    comment: str | None = None
    facts: dict[str, Any]
    questions: Sequence[Question]

    @abstractmethod
    def steps(self, fps: float, frames_per_step: int) -> Iterator[Step]:
        """Its steps in order."""


class FileStream(Stream):
    """A video file."""

    def __init__(self, path: str | Path, questions: Sequence[Question]) -> None:
        """Open the file to learn its length.

        Raises:
            SourceError: it cannot be read, or does not say how long it is.
        """
        self._path = path
        with open_source(path) as source:
            info = source.info
            if info.duration_s is None:
                raise SourceUnreadable(f"{path} does not say how long it is", hint="remux it: ffmpeg -i IN -c copy OUT")
            self.name, self.length_s, self.comment = info.name, info.duration_s, info.comment
            self.facts = {"size_bytes": info.size_bytes, "fingerprint": info.fingerprint}
        self.questions = questions

    def steps(self, fps: float, frames_per_step: int) -> Iterator[Step]:
        """Read the file once."""
        with open_source(self._path) as source:
            yield from read_steps(source, fps, frames_per_step)


@dataclass(frozen=True, slots=True)
class Pressure:
    """What happens besides the evidence, each on its own.

    Attributes:
        events_per_minute: distracting events.
        cut_s: shortest and longest scene in seconds; None: one background for ever.
        moving: share of the shapes that move.
        alike: share of the distracting events that look like the evidence: its colour and place, another shape.
        backdrop: what is behind everything.
    """

    events_per_minute: float = 6.0
    cut_s: tuple[int, int] | None = (6, 20)
    moving: float = 0.3
    alike: float = 0.0
    backdrop: Backdrop = "plain"


class WorldStream(Stream):
    """A procedural stream: four events that are asked about, and distraction before and after them."""

    comment = WORLD_MARK

    def __init__(
        self,
        seed: int,
        length_s: int,
        pressure: Pressure,
        *,
        evidence_s: int = 16,
        per_type: int = 2,
        before: Before = 0,
        also: Sequence[str] = (),
    ) -> None:
        """Make the world and its questions.

        Args:
            seed: everything follows from it.
            length_s: of the whole stream.
            pressure: what comes besides the evidence.
            evidence_s: seconds in which the four events of the evidence lie.
            per_type: questions of each type at the most.
            before: seconds of distraction before the evidence, or "mix"; see `place_evidence`.
            also: further types of questions; see `find_lasting_questions`.

        Raises:
            ConfigError: a value is out of its range.
        """
        before_s, again_s = place_evidence(before, seed, length_s)
        until_s = (before_s if again_s is None else again_s) + evidence_s
        if length_s <= until_s:
            raise ConfigError(
                f"a stream of {length_s} s leaves nothing behind evidence that ends at {until_s} s",
                hint="make it longer, or let the evidence come earlier",
            )
        config = WorldConfig(
            seed=seed,
            length_s=length_s,
            events_per_minute=pressure.events_per_minute,
            moving=pressure.moving,
            cut_s=pressure.cut_s,
            evidence_events=4,
            evidence_s=evidence_s,
            before_s=before_s,
            again_s=again_s,
            alike=pressure.alike,
            backdrop=pressure.backdrop,
        )
        self._world = World(config)
        self.name, self.length_s = f"world-{seed}", float(length_s)
        world = asdict(config) | {"cut_s": list(config.cut_s) if config.cut_s else None}
        # Said where it says something: a stream that was there before a setting was is the one it has always been.
        for name, plain in (("before_s", 0), ("again_s", None), ("alike", 0.0), ("backdrop", "plain")):
            if world[name] == plain:
                del world[name]
        self.facts = {"world": world}
        self.questions = find_lasting_questions(self._world, float(until_s), per_type, also)

    def steps(self, fps: float, frames_per_step: int) -> Iterator[Step]:
        """Draw the frames at the sampling times."""
        n = round(self.length_s * fps)
        frames = (Frame(k / fps, self._world.frame(k / fps), 1 / fps) for k in range(n))
        return steps(sample(frames, fps), frames_per_step)


def find_lasting_questions(world: World, until_s: float, per_type: int, also: Sequence[str] = ()) -> list[Question]:
    """Questions about the evidence, which has ended at `until_s`, that have the same answer at the end of the stream.

    A question is kept if it can be asked at both times and its answer is the same. Evidence is counted as last seen
    when the last event that decides it left, at its second showing if there is one; of a "no" (it never appeared) when
    the evidence ends. A second showing adds nothing that could be asked: what is asked is true of both. Types in
    `also` (of `phrases.ORDER_TYPES`) come behind the others, which they do not change.
    """
    repeats = world.repeats()
    early, late = (
        [event for event in world.events_until(time_s) if event not in repeats]
        for time_s in (until_s, world.config.length_s)
    )
    before_s, *again_s = world.config.showings
    evidence = {i for i, event in enumerate(early) if before_s <= event.start_s < before_s + world.config.evidence_s}
    seen_again_s = again_s[0] - before_s if again_s else 0
    rng = np.random.default_rng([world.config.seed, 5])
    found: list[Question] = []
    for kind in (kind for kind in (*TYPES, *also) if find_type(kind).retrospective):
        for_ever = {(fact.answer, *fact.slots.items()) for fact in find_facts(kind, late, world.config.length_s)}
        left = [
            fact
            for fact in find_facts(kind, early, until_s)
            if evidence.issuperset(fact.evidence) and (fact.answer, *fact.slots.items()) in for_ever
        ]
        for _ in range(min(per_type, len(left))):
            fact = pick(rng, left)
            left = [other for other in left if other is not fact]
            # A "no" has no event of its own.
            seen_s = fact.evidence_s + (seen_again_s if fact.evidence else 0)
            found.append(
                Question(f"{kind}-{len(found)}", phrase(rng, kind, fact), fact.answer, kind, seen_s, "evidence")
            )
    return found


def make_worlds(
    seeds: Iterable[int],
    length_s: int,
    pressure: Pressure,
    *,
    evidence_s: int = 16,
    per_type: int = 2,
    before: Before = 0,
    also: Sequence[str] = (),
) -> list[Stream]:
    """One procedural stream per seed; see `WorldStream`."""
    return [
        WorldStream(seed, length_s, pressure, evidence_s=evidence_s, per_type=per_type, before=before, also=also)
        for seed in seeds
    ]


def open_files(sources: Sequence[str | Path], questions: str | Path) -> list[Stream]:
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
