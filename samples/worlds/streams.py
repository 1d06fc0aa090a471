"""Procedural streams: evidence that is asked about, at a known time, among distracting events.

A `Worlds` record describes a set of streams. No file is needed: frames are drawn when they are
sampled. Questions are about the evidence alone, and their answers stay true until the stream ends.

Evidence that opens a stream meets free slots of a memory, and later evidence does not. So the
default, "mix", gives each of four streams that follow each other another place of the evidence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, replace
from typing import Final, Literal

import msgspec
import numpy as np

from protokv.errors import ConfigError
from protokv.replay.benchmarks import find_question_group as find_dataset_group
from protokv.replay.questions import ReplayQuestion
from protokv.replay.streams import ReplayStream
from protokv.video import VideoStep
from protokv.video.sampling import group_frames, sample_frames
from protokv.video.source import Frame
from samples.worlds.events import BLOCK_S
from samples.worlds.phrases import GROUPS, ORDER_TYPES, SPEECH_TYPES, TIME_TYPES, TYPES
from samples.worlds.questions import find_facts, phrase, pick_different
from samples.worlds.world import Backdrop, World, WorldConfig

Evidence = Literal["moments", "minutes"]
"""Four events within seconds; or shapes that appear several times, and one that slowly crosses the
picture.
"""

COUNTED: Final = 3
"""Shapes that appear several times."""

CROSSING_S: Final = (60, 100, 140, 180)
"""Seconds that a shape may take to cross the picture, if the stream is long enough."""

PLACES: Final = ("start", "middle", "late", "repeated")
"""Places of the evidence in a mixture; the seed of a world chooses one."""

_LATER_SETTINGS: Final = (
    "before_s",
    "again_s",
    "distractor_similarity",
    "backdrop",
    "counted",
    "counted_in",
    "crossing_s",
    "speech_per_minute",
)
"""Left out of the facts of a stream at their defaults, so that old rows and new ones of one world
agree.
"""


def find_group(kind: str, dataset: str = "") -> str:
    """Return the group of a type, as `replay.report.summarise_answers` takes it; that of a data set
    if one is named.
    """
    return find_dataset_group(kind, dataset) if dataset else GROUPS.get(kind, "other")


class Worlds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Procedural streams, one a seed.

    Attributes:
        first_seed, count: the seeds.
        length_s: of each stream.
        distractor_rate: distracting events per minute.
        distractor_similarity: share of them with colour and place of the evidence, and another
            shape.
        cut_s: shortest and longest scene in seconds; None: one background.
        moving: share of the shapes that move.
        backdrop: what is behind everything.
        evidence: events of seconds, or of minutes; those of minutes have their own places
            (`place_minutes`).
        evidence_s: seconds in which the four events of the evidence lie.
        before: seconds of distraction before the evidence, or "mix"; see `place_evidence`.
        per_type: most questions of each type.
        speech_rate: captions per minute besides those about the evidence; None: nothing is said.
    """

    first_seed: int = 1
    count: int = 4
    length_s: int = 300
    distractor_rate: float = 6.0
    distractor_similarity: float = 0.0
    cut_s: tuple[int, int] | None = (6, 20)
    moving: float = 0.3
    backdrop: Backdrop = "plain"
    evidence: Evidence = "moments"
    evidence_s: int = 16
    before: int | Literal["mix"] = "mix"
    per_type: int = 2
    speech_rate: float | None = None

    @property
    def seeds(self) -> range:
        """The seeds of the streams."""
        return range(self.first_seed, self.first_seed + self.count)

    def open(self, types: Sequence[str] | None = None) -> list[ReplayStream]:
        """Make the streams, with questions of the usual types and of those that are named.

        Raises:
            ConfigError: a value is out of its range.
        """
        return [WorldStream(seed, self, types or ()) for seed in self.seeds]


class WorldStream(ReplayStream):
    """One procedural stream."""

    def __init__(self, seed: int, worlds: Worlds, types: Sequence[str] = ()) -> None:
        """Make the world and its questions.

        Args:
            seed: decides everything that is drawn.
            worlds: all other settings.
            types: names of further types to ask: of order (`ORDER_TYPES`), of speech
                (`SPEECH_TYPES`), or of time (`TIME_TYPES`), the only types that are asked about
                evidence of minutes.

        Raises:
            ConfigError: a value is out of its range.
        """
        config = WorldConfig(
            seed=seed,
            length_s=worlds.length_s,
            events_per_minute=worlds.distractor_rate,
            moving=worlds.moving,
            cut_s=worlds.cut_s,
            backdrop=worlds.backdrop,
            speech_per_minute=worlds.speech_rate,
        )
        self.has_words = worlds.speech_rate is not None
        if worlds.evidence == "minutes":
            if worlds.before != "mix" or worlds.distractor_similarity:
                raise ConfigError(
                    "evidence that lasts for minutes has its own places, and nothing looks like it",
                    hint="leave out --before and --distractor-similarity",
                )
            counted_in, crossing_s = place_minutes(seed, worlds.length_s)
            self.world = World(
                replace(config, counted=COUNTED, counted_in=counted_in, crossing_s=crossing_s)
            )
            until_s = int(max(event.end_s for event in (*self.world.counted, *self.world.crossing)))
            kinds = [kind for kind in TIME_TYPES if kind in types]
            self.questions = find_questions_of_minutes(self.world, worlds.per_type, kinds)
        else:
            before_s, again_s = place_evidence(worlds.before, seed, worlds.length_s)
            config = replace(
                config,
                evidence_events=4,
                evidence_s=worlds.evidence_s,
                before_s=before_s,
                again_s=again_s,
                distractor_similarity=worlds.distractor_similarity,
            )
            self.world = World(config)
            until_s = config.showings[-1] + worlds.evidence_s
            kinds = [kind for kind in (*ORDER_TYPES, *SPEECH_TYPES) if kind in types]
            self.questions = find_lasting_questions(
                self.world, float(until_s), worlds.per_type, kinds
            )
        if worlds.length_s <= until_s:
            raise ConfigError(
                f"a stream of {worlds.length_s} s leaves nothing behind evidence that ends at "
                f"{until_s} s",
                hint="make it longer, or let the evidence come earlier",
            )
        self.name = f"world-{seed}"
        self.length_s = float(worlds.length_s)
        plain = {
            field.name: field.default
            for field in fields(WorldConfig)
            if field.name in _LATER_SETTINGS
        }
        self.facts = {
            "world": {
                name: list(value) if isinstance(value, tuple) else value
                for name, value in asdict(self.world.config).items()
                if name not in plain or value != plain[name]
            }
        }

    def steps(self, fps: float, frames_per_step: int) -> Iterator[VideoStep]:
        """Draw the frames at the sampling times."""
        n = round(self.length_s * fps)
        frames = (Frame(k / fps, self.world.frame(k / fps), 1 / fps) for k in range(n))
        return group_frames(sample_frames(frames, fps), frames_per_step)

    def words(self, start_s: float, end_s: float) -> list[str]:
        """Return the captions of the seconds that begin there."""
        return [caption.text for caption in self.world.said(start_s, end_s)]


def find_lasting_questions(
    world: World, until_s: float, per_type: int, also: Sequence[str] = ()
) -> list[ReplayQuestion]:
    """Return questions about evidence that ended at `until_s`, whose answers are the same when the
    stream ends.

    Evidence was last seen when the last event that decides the answer left, at its second showing
    if there is one; for a "no" (it never appeared), when the evidence ended. A second showing adds
    no questions: each is true of both. The types in `also` come behind the others and do not change
    these.
    """
    repeats = world.repeats()
    early, late = (
        [event for event in world.events_until(time_s) if event not in repeats]
        for time_s in (until_s, world.config.length_s)
    )
    told, told_late = (world.said(0, time_s) for time_s in (until_s, world.config.length_s))
    before_s, *again_s = world.config.showings
    evidence = {
        i
        for i, event in enumerate(early)
        if before_s <= event.start_s < before_s + world.config.evidence_s
    }
    seen_again_s = again_s[0] - before_s if again_s else 0
    rng = np.random.default_rng([world.config.seed, 5])
    found: list[ReplayQuestion] = []
    for kind in (kind for kind in (*TYPES, *also) if kind in GROUPS):
        for_ever = {
            (fact.answer, *fact.slots.items())
            for fact in find_facts(kind, late, world.config.length_s, told_late)
        }
        lasting = [
            fact
            for fact in find_facts(kind, early, until_s, told)
            if evidence.issuperset(fact.evidence) and (fact.answer, *fact.slots.items()) in for_ever
        ]
        for fact in pick_different(rng, lasting, per_type):
            # A "no" has no event of its own.
            seen_s = fact.evidence_s + (seen_again_s if fact.evidence else 0)
            text = phrase(rng, kind, fact)
            found.append(
                ReplayQuestion(f"{kind}-{len(found)}", text, fact.answer, kind, seen_s, "evidence")
            )
    return found


def find_questions_of_minutes(
    world: World, per_type: int, types: Sequence[str]
) -> list[ReplayQuestion]:
    """Return questions about how often the counted shapes appeared, and where the crossing one was
    first and last.

    The answer stays the same once the last appearance, or the crossing, has ended; that of "first"
    once the shape has left its first place.
    """
    events = world.events_until(world.config.length_s)
    rng = np.random.default_rng([world.config.seed, 5])
    found: list[ReplayQuestion] = []
    for kind in types:
        shapes = {event.shape for event in (world.counted if kind == "times" else world.crossing)}
        facts = find_facts(kind, events, world.config.length_s)
        own = [fact for fact in facts if shapes.issuperset(events[i].shape for i in fact.evidence)]
        for fact in pick_different(rng, own, per_type):
            text = phrase(rng, kind, fact)
            found.append(
                ReplayQuestion(
                    f"{kind}-{len(found)}", text, fact.answer, kind, fact.evidence_s, "evidence"
                )
            )
    return found


def place_evidence(
    before: int | Literal["mix"], seed: int, length_s: int
) -> tuple[int, int | None]:
    """Return when the evidence begins, and when it is shown again (None: never), in seconds.

    A mixture has it at the start, after a quarter of the stream, after half, or at the start and
    again after a quarter, by the seed. All are full minutes, so that the evidence never crosses a
    block of the world. A stream of less than two minutes has it at the start.
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
    """Return the minutes of the counted shapes (the first, and how many), and when another shape
    crosses the picture.

    Both lie in the first half of the stream, or in its first minute. An even seed spreads the
    appearances over that half, at most one a minute; an odd one puts all into one minute. The
    crossing begins in one of the first three.
    """
    half = max(length_s // 2 // BLOCK_S, 1)
    counted_in = (0, half) if seed % 2 == 0 else (seed // 2 % half, 1)
    begins_s = min(seed % 3, half - 1) * BLOCK_S
    takes_s = CROSSING_S[seed // 3 % len(CROSSING_S)]
    return counted_in, (begins_s, min(begins_s + takes_s, half * BLOCK_S))
