"""Streams to replay: video files with questions, and procedural worlds whose evidence times are known.

A world needs no file: its frames are drawn when they are sampled, and its questions are those about the evidence whose
truth never changes, whatever comes later. Time (how long ago the evidence was), distractors (what happens around it)
and where in the stream it lies are parameters of their own. Knows no memory and no model.

What the evidence of a procedural stream is, and where it lies: after a while, or in a mixture, by the world's seed.

What comes first in a stream falls into free slots of a memory, and what comes later does not: with the evidence at the
start alone, a memory that averages everything which no longer fits looks as good as one that does not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from protokv.errors import ConfigError, SourceUnreadable
from protokv.mini import WORLD_MARK
from protokv.mini.events import BLOCK_S
from protokv.mini.phrases import ORDER_TYPES, TIME_TYPES, TYPES
from protokv.mini.questions import find_facts, phrase, pick_different
from protokv.mini.world import Backdrop, World, WorldConfig
from protokv.replay.questions import Question, find_type, load_questions
from protokv.video import Step, open_source, read_steps
from protokv.video.sampling import sample, steps
from protokv.video.source import Frame

_ADDED: Final = ("before_s", "again_s", "distractor_similarity", "backdrop", "counted", "counted_in", "crossing_s")
"""Settings of worlds that streams had before them do not name."""


class Stream(ABC):
    """Something to watch, and what to ask about it.

    Attributes:
        name: as it stands in the results.
        length_s: seconds of stream time.
        facts: what decides its frames, plain JSON.
        questions: about it.
        comment: what its file says of itself; see `protokv.storage.watched.is_beyond`.
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
class Distractors:
    """What happens besides the evidence, each on its own.

    Attributes:
        events_per_minute: distracting events.
        cut_s: shortest and longest scene in seconds; None: one background for ever.
        moving: share of the shapes that move.
        distractor_similarity: share of the distracting events with colour and place of the evidence, and another shape.
        backdrop: what is behind everything.
    """

    events_per_minute: float = 6.0
    cut_s: tuple[int, int] | None = (6, 20)
    moving: float = 0.3
    distractor_similarity: float = 0.0
    backdrop: Backdrop = "plain"


class WorldStream(Stream):
    """A procedural stream: evidence that is asked about, and distraction around it."""

    comment = WORLD_MARK

    def __init__(
        self,
        seed: int,
        length_s: int,
        distractors: Distractors,
        *,
        evidence_s: int = 16,
        per_type: int = 2,
        before: Before = 0,
        also: Sequence[str] = (),
        evidence: Evidence = "moments",
    ) -> None:
        """Make the world and its questions.

        Args:
            seed: everything follows from it.
            length_s: of the whole stream.
            distractors: what comes besides the evidence.
            evidence_s: seconds in which the four events of the evidence lie.
            per_type: questions of each type at the most.
            before: seconds of distraction before the evidence, or "mix"; see `place_evidence`.
            also: further types of questions; see `find_lasting_questions`. Of evidence that lasts for minutes no others
                are asked than those about time.
            evidence: four events, placed by the two settings above, or what lasts for minutes, placed by the seed; see
                `place_minutes`.

        Raises:
            ConfigError: a value is out of its range.
        """
        config = WorldConfig(
            seed=seed,
            length_s=length_s,
            events_per_minute=distractors.events_per_minute,
            moving=distractors.moving,
            cut_s=distractors.cut_s,
            backdrop=distractors.backdrop,
        )
        if evidence == "minutes":
            if before != "mix" or distractors.distractor_similarity:
                raise ConfigError(
                    "evidence that lasts for minutes has its own places, and nothing looks like it",
                    hint="leave out --before and --distractor-similarity",
                )
            counted_in, crossing_s = place_minutes(seed, length_s)
            config = replace(config, counted=COUNTED, counted_in=counted_in, crossing_s=crossing_s)
            self._world = World(config)
            until_s = int(max(event.end_s for event in (*self._world.counted, *self._world.crossing)))
            kinds = [kind for kind in TIME_TYPES if kind in also]
            self.questions = find_questions_of_minutes(self._world, per_type, kinds)
        else:
            before_s, again_s = place_evidence(before, seed, length_s)
            config = replace(
                config,
                evidence_events=4,
                evidence_s=evidence_s,
                before_s=before_s,
                again_s=again_s,
                distractor_similarity=distractors.distractor_similarity,
            )
            self._world = World(config)
            until_s = config.showings[-1] + evidence_s
            kinds = [kind for kind in ORDER_TYPES if kind in also]
            self.questions = find_lasting_questions(self._world, float(until_s), per_type, kinds)
        if length_s <= until_s:
            raise ConfigError(
                f"a stream of {length_s} s leaves nothing behind evidence that ends at {until_s} s",
                hint="make it longer, or let the evidence come earlier",
            )
        self.name, self.length_s = f"world-{seed}", float(length_s)
        # Said where it says something: a stream that was there before a setting was is the one it has always been.
        plain = {field.name: field.default for field in fields(WorldConfig) if field.name in _ADDED}
        self.facts = {
            "world": {
                name: list(value) if isinstance(value, tuple) else value
                for name, value in asdict(config).items()
                if name not in plain or value != plain[name]
            }
        }

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
        for fact in pick_different(rng, left, per_type):
            # A "no" has no event of its own.
            seen_s = fact.evidence_s + (seen_again_s if fact.evidence else 0)
            found.append(
                Question(f"{kind}-{len(found)}", phrase(rng, kind, fact), fact.answer, kind, seen_s, "evidence")
            )
    return found


def find_questions_of_minutes(world: World, per_type: int, types: Sequence[str]) -> list[Question]:
    """Questions about how often the counted shapes appeared, and where the crossing one was first and last.

    They are asked of nothing else, so that the answer stays the same once all of the evidence has been seen. That is
    when the last appearance ends, or the crossing; of "first", when the shape leaves its first place.
    """
    events = world.events_until(world.config.length_s)
    rng = np.random.default_rng([world.config.seed, 5])
    found: list[Question] = []
    for kind in types:
        shapes = {event.shape for event in (world.counted if kind == "times" else world.crossing)}
        left = [
            fact
            for fact in find_facts(kind, events, world.config.length_s)
            if shapes.issuperset(events[i].shape for i in fact.evidence)
        ]
        for fact in pick_different(rng, left, per_type):
            text = phrase(rng, kind, fact)
            found.append(Question(f"{kind}-{len(found)}", text, fact.answer, kind, fact.evidence_s, "evidence"))
    return found


def make_worlds(
    seeds: Iterable[int],
    length_s: int,
    distractors: Distractors,
    *,
    evidence_s: int = 16,
    per_type: int = 2,
    before: Before = 0,
    also: Sequence[str] = (),
    evidence: Evidence = "moments",
) -> list[Stream]:
    """One procedural stream per seed; see `WorldStream`."""
    return [
        WorldStream(
            seed,
            length_s,
            distractors,
            evidence_s=evidence_s,
            per_type=per_type,
            before=before,
            also=also,
            evidence=evidence,
        )
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


Before = int | Literal["mix"]
"""Seconds of distraction before the evidence, or "mix"."""

Evidence = Literal["moments", "minutes"]
"""Four events within seconds; or shapes that come several times, and one that slowly crosses the picture."""

COUNTED: Final = 3
"""Shapes that come several times."""

CROSSING_S: Final = (60, 100, 140, 180)
"""How long a shape takes to cross the picture, if there is room."""

PLACES: Final = ("start", "middle", "late", "repeated")
"""Of the mixture; a world's is chosen by its seed."""


def place_evidence(before: Before, seed: int, length_s: int) -> tuple[int, int | None]:
    """When the evidence begins, and when it is shown a second time (None: never), in seconds.

    In the mixture, of worlds whose seeds follow each other one has it at the start, the next after a quarter of the
    stream, the next after half of it, and the next at the start and again after a quarter; at full minutes, so that it
    never crosses a block of the world. A stream of less than two minutes has it at the start.
    """
    if before != "mix":
        return before, None
    quarter, half = (length_s // part // BLOCK_S * BLOCK_S for part in (4, 2))
    again = max(quarter, BLOCK_S)
    places: dict[str, tuple[int, int | None]] = {
        "start": (0, None),
        "middle": (quarter, None),
        "late": (half, None),
        "repeated": (0, again if again <= length_s // 2 else None),
    }
    return places[PLACES[seed % len(PLACES)]]


def place_minutes(seed: int, length_s: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """In which minutes counted shapes appear (the first, and how many), and from when to when another one crosses.

    Both lie in the first half of the stream, or in its first minute. Of worlds whose seeds follow each other every
    second one shows a shape once a minute at most, over that whole half, and the others show all within a minute, each
    in another one. What crosses begins with one of the first three minutes.
    """
    half = max(length_s // 2 // BLOCK_S, 1)
    counted_in = (0, half) if seed % 2 == 0 else (seed // 2 % half, 1)
    begins_s = min(seed % 3, half - 1) * BLOCK_S
    takes_s = CROSSING_S[seed // 3 % len(CROSSING_S)]
    return counted_in, (begins_s, min(begins_s + takes_s, half * BLOCK_S))
