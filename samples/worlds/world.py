"""Procedural video streams of any length in which every event is known.

A `World` is a pure function of its `WorldConfig`: scenes and events are made in blocks of `BLOCK_S`
seconds from (seed, block), so what happens at time t does not depend on the length of the stream.
Only the events of a shape that crosses the picture may cross the border of a block; they follow
from the config alone. What is said changes no picture. Knows nothing of questions, files or models,
and needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import merge
from itertools import chain
from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from protokv.errors import ConfigError, suggest_name
from samples.worlds.events import (
    BLOCK_S,
    LINES,
    MOST_SHAPES,
    MOST_TIMES,
    Event,
    Pools,
    deal,
    draw_counted,
    draw_crossing,
    find_touched,
    place_evidence_events,
    scatter_events,
    split_pools,
)
from samples.worlds.pictures import SIDES, Scenery, draw, draw_noise, make_scenery, paint
from samples.worlds.speech import NAMES, Caption, say_owner, say_something

TRAINING_SIDE: Final = 84
MAX_EVIDENCE: Final = 4

Backdrop = Literal["plain", "natural"]
"""The noise behind the shapes, besides the scenery."""


@dataclass(frozen=True, slots=True)
class WorldConfig:
    """The settings of a stream. All shares are fractions in [0, 1].

    With `evidence_events` = 0, events come at `events_per_minute` from the start. With 1 to 4, that
    many different events are the evidence. They lie in the `evidence_s` seconds from `before_s` on,
    and are shown a second time from `again_s` on, if given. Each showing lies inside one block of
    `BLOCK_S` seconds. Everywhere else distracting events come at `events_per_minute`, with shapes,
    colours and places that the evidence does not have (one shape never appears), so that questions
    about the evidence stay unambiguous. The evidence does not depend on its time.

    Two settings make a world harder. The share `distractor_similarity` of the distracting events
    has the colour and place of an event of the evidence, and another shape. The backdrop "natural"
    puts drifting noise with the spectrum of natural images behind everything.

    Instead, evidence may last for minutes (`samples.worlds.events`; then `evidence_events` is 0):
    `counted` shapes appear one to four times each, within `counted_in[1]` minutes from minute
    `counted_in[0]` on, and one shape crosses the picture in the seconds `crossing_s`, drawn above
    everything else. Distracting events have none of these shapes and not the colour of the crossing
    shape, and keep out of its way.

    With `speech_per_minute` given, things are said (`samples.worlds.speech`): within each showing,
    who owns each shape of the evidence, in a second of its own; and everywhere else so many other
    captions a minute.
    """

    seed: int = 0
    length_s: int = 60
    events_per_minute: float = 10.0
    moving: float = 0.3
    overlap: float = 0.25
    cut_s: tuple[int, int] | None = (6, 20)
    evidence_events: int = 0
    evidence_s: int = 60
    before_s: int = 0
    again_s: int | None = None
    distractor_similarity: float = 0.0
    backdrop: Backdrop = "plain"
    counted: int = 0
    counted_in: tuple[int, int] = (0, 1)
    crossing_s: tuple[int, int] | None = None
    speech_per_minute: float | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError if a setting that a user may choose is out of range."""
        ranges = {
            "events_per_minute": (0, 40),
            "speech_per_minute": (0, 40),
            "moving": (0, 1),
            "overlap": (0, 1),
            "distractor_similarity": (0, 1),
            "evidence_events": (0, MAX_EVIDENCE),
            "counted": (0, MOST_SHAPES),
        }
        for name, (low, high) in ranges.items():
            if not low <= (getattr(self, name) or 0) <= high:
                raise ConfigError(f"expected {name} in {low}..{high}, got {getattr(self, name)}")
        if self.length_s < 1:
            raise ConfigError(f"expected length_s of at least 1 second, got {self.length_s}")
        if self.cut_s is not None and not 1 <= self.cut_s[0] <= self.cut_s[1] <= BLOCK_S:
            raise ConfigError(
                f"expected cut_s as 1 <= shortest <= longest <= {BLOCK_S}, got {self.cut_s}"
            )
        if self.backdrop not in get_args(Backdrop):
            raise ConfigError(
                f"there is no backdrop {self.backdrop!r}",
                hint=suggest_name(self.backdrop, get_args(Backdrop)),
            )
        if not self.evidence_events:
            return
        if not 4 * self.evidence_events <= self.evidence_s <= BLOCK_S:
            raise ConfigError(
                f"expected evidence_s in {4 * self.evidence_events}..{BLOCK_S} for "
                f"{self.evidence_events} events, got {self.evidence_s}"
            )
        for start in self.showings:
            if start < 0 or start % BLOCK_S + self.evidence_s > BLOCK_S:
                raise ConfigError(
                    f"evidence of {self.evidence_s} s at {start} s crosses a full minute",
                    hint=(
                        f"let it begin at a full minute, or at most {BLOCK_S - self.evidence_s} s "
                        "behind one"
                    ),
                )

    @property
    def showings(self) -> tuple[int, ...]:
        """Return when each showing of the evidence begins, in seconds."""
        return (self.before_s,) if self.again_s is None else (self.before_s, self.again_s)


@dataclass(frozen=True, slots=True)
class Scene:
    """A part of the stream with one background: [start_s, end_s), cut at whole seconds."""

    start_s: int
    end_s: int
    scenery: Scenery


@lru_cache(maxsize=256)
def _scenes(config: WorldConfig, block: int) -> tuple[Scene, ...]:
    if config.cut_s is None:
        # One background for the whole stream.
        return (Scene(0, config.length_s, make_scenery(np.random.default_rng([config.seed, 1]))),)
    shortest, longest = config.cut_s
    rng = np.random.default_rng([config.seed, 1, block])
    start = block * BLOCK_S
    end = (block + 1) * BLOCK_S
    scenes = []
    while start < end:
        cut = start + int(rng.integers(shortest, longest + 1))
        if end - cut < shortest:
            cut = end
        scenes.append(Scene(start, cut, make_scenery(rng)))
        start = cut
    return tuple(scenes)


@dataclass(frozen=True, slots=True)
class _Lasting:
    """Evidence that lasts for minutes, and the pools of distracting events."""

    counted: tuple[Event, ...]
    crossing: tuple[Event, ...]
    pools: Pools

    def touched(self, start_s: float, end_s: float) -> set[int]:
        """Return the places that the crossing shape needs in [start_s, end_s)."""
        return find_touched(self.crossing, start_s, end_s)


@lru_cache(maxsize=64)
def _lasting(config: WorldConfig) -> _Lasting:
    everything = Pools.everything()
    if not config.counted and config.crossing_s is None:
        return _Lasting((), (), everything)
    rng = np.random.default_rng([config.seed, 7])
    shapes = rng.permutation(everything.shapes).tolist()
    colours = rng.permutation(everything.colours).tolist()
    crossing: tuple[Event, ...] = ()
    if config.crossing_s is not None:
        (line,) = deal(config.seed, 0, LINES)
        crossing = draw_crossing(rng, line, shapes[0], colours[0], *config.crossing_s)
    # The last shape never appears.
    own = 1 + config.counted
    found = _Lasting(
        (), crossing, Pools(tuple(shapes[own:-1]), tuple(colours[1:]), everything.places)
    )
    start, n = config.counted_in
    counted = draw_counted(
        np.random.default_rng([config.seed, 8]),
        shapes[1:own],
        found.pools,
        deal(config.seed, 1, range(1, MOST_TIMES + 1), config.counted) if config.counted else (),
        range(start, start + n),
        config.moving,
        found.touched,
    )
    return replace(found, counted=counted)


@lru_cache(maxsize=256)
def _events(config: WorldConfig, block: int) -> tuple[Event, ...]:
    rng = np.random.default_rng([config.seed, 2, block])
    start_s = block * BLOCK_S
    end_s = (block + 1) * BLOCK_S
    lasting = _lasting(config)
    pools = lasting.pools
    evidence: tuple[Event, ...] = ()
    # (start, end, events) of each time without distraction.
    shown: list[tuple[int, int, tuple[Event, ...]]] = [
        (int(event.start_s), int(event.end_s), (event,))
        for event in lasting.counted
        if start_s <= event.start_s < end_s
    ]
    if config.evidence_events:
        own, pools = split_pools(np.random.default_rng([config.seed, 3]), config.evidence_events)
        drawn = rng if block == 0 else np.random.default_rng([config.seed, 2, 0])
        evidence = place_evidence_events(drawn, own, config.evidence_s, config.moving)
        shown = [
            (start, start + config.evidence_s, tuple(event.later(start) for event in evidence))
            for start in config.showings
            if start_s <= start < end_s
        ]
    found: list[Event] = []
    # Distracting events fill the rest of the block.
    for start, end, own_events in [*shown, (end_s, end_s, ())]:
        if start > start_s:
            found += scatter_events(
                rng,
                pools,
                start_s,
                start,
                config.events_per_minute,
                config.moving,
                config.overlap,
                evidence,
                config.distractor_similarity,
                lasting.touched,
            )
        found += own_events
        start_s = end
    return tuple(found)


@lru_cache(maxsize=256)
def _captions(config: WorldConfig, block: int) -> tuple[Caption, ...]:
    if config.speech_per_minute is None:
        return ()
    rng = np.random.default_rng([config.seed, 9])
    own, _ = split_pools(np.random.default_rng([config.seed, 3]), config.evidence_events)
    names = rng.permutation(len(NAMES)).tolist()
    seconds = rng.permutation(config.evidence_s).tolist()
    evidence = [say_owner(rng, *told) for told in zip(seconds, own.shapes, names, strict=False)]
    shown = [
        start for start in config.showings if config.evidence_events and start // BLOCK_S == block
    ]
    free = set(range(block * BLOCK_S, (block + 1) * BLOCK_S))
    free -= {second for start in shown for second in range(start, start + config.evidence_s)}
    rng = np.random.default_rng([config.seed, 9, block])
    n = int(config.speech_per_minute * len(free) / BLOCK_S + rng.random())
    shapes = [shape for shape in Pools.everything().shapes if shape not in own.shapes]
    others = say_something(
        rng, rng.permutation(sorted(free))[:n].tolist(), shapes, names[len(own.shapes) :]
    )
    said = [*others, *(caption.later(start) for start in shown for caption in evidence)]
    return tuple(sorted(said, key=lambda caption: caption.second))


class World:
    """One procedural stream: `events_until`, `visible`, `scene` and `frame` at any time of it."""

    def __init__(self, config: WorldConfig | None = None) -> None:
        self.config = config or WorldConfig()

    def events(self) -> Iterator[Event]:
        """Yield every event of the stream in order of start; the last may reach beyond the end of
        the stream.
        """
        blocks = (
            _events(self.config, block) for block in range(-(-self.config.length_s // BLOCK_S))
        )
        for event in merge(
            chain.from_iterable(blocks), self.crossing, key=lambda event: event.start_s
        ):
            if event.start_s < self.config.length_s:
                yield event

    @property
    def counted(self) -> tuple[Event, ...]:
        """Return all appearances of the counted shapes, in order of time."""
        return _lasting(self.config).counted

    @property
    def crossing(self) -> tuple[Event, ...]:
        """Return the shape that crosses the picture: a chain of events, one per place."""
        return _lasting(self.config).crossing

    def repeats(self) -> list[Event]:
        """Return the events of the second showing of the evidence."""
        again_s = self.config.again_s
        if again_s is None:
            return []
        end_s = again_s + self.config.evidence_s
        return [e for e in _events(self.config, again_s // BLOCK_S) if again_s <= e.start_s < end_s]

    def events_until(self, time_s: float) -> list[Event]:
        """Return the events that began before `time_s`, in order of start."""
        found = []
        for event in self.events():
            if event.start_s >= time_s:
                break
            found.append(event)
        return found

    def said(self, start_s: float, end_s: float) -> list[Caption]:
        """Return what is said in the seconds that begin in [start_s, end_s), in order."""
        blocks = range(int(start_s // BLOCK_S), int(end_s // BLOCK_S) + 1)
        said = (caption for block in blocks for caption in _captions(self.config, block))
        return [
            caption
            for caption in said
            if start_s <= caption.second < min(end_s, self.config.length_s)
        ]

    def visible(self, time_s: float) -> list[Event]:
        """Return the events in the frame at `time_s`; the crossing shape, which is drawn above the
        others, is last.
        """
        block = int(time_s // BLOCK_S)
        return [
            e
            for e in (*_events(self.config, block), *self.crossing)
            if e.start_s <= time_s < e.end_s
        ]

    def scene(self, time_s: float) -> Scene:
        """Return the scene at `time_s`."""
        scenes = _scenes(self.config, int(time_s // BLOCK_S))
        return next((s for s in scenes if time_s < s.end_s), scenes[-1])

    def frame(self, time_s: float, side: int = TRAINING_SIDE) -> NDArray[np.uint8]:
        """Draw the frame at `time_s`, `[side, side, 3]` uint8 RGB; a pure function of (config,
        time_s, side).

        Sides of 84, 168, 336 and 672 are drawn anti-aliased; any other is area-resized from the
        next larger one.
        """
        native = next((s for s in SIDES if s >= side), SIDES[-1])
        scene = self.scene(time_s)
        picture = draw(scene.scenery, time_s - scene.start_s, native)
        if self.config.backdrop == "natural":
            picture += draw_noise((self.config.seed, scene.start_s), time_s - scene.start_s, native)
        for event in self.visible(time_s):
            x, y = event.centre(time_s)
            paint(picture, event.shape, event.size, event.tint, x, y)
        frame: NDArray[np.uint8] = np.clip(picture + 0.5, 0, 255).astype(np.uint8)
        if native != side:
            how = Image.Resampling.BOX if side < native else Image.Resampling.BICUBIC
            frame = np.asarray(Image.fromarray(frame).resize((side, side), how))
        return frame

    def frames(
        self, start_s: float, end_s: float, fps: float = 2.0, side: int = TRAINING_SIDE
    ) -> NDArray[np.uint8]:
        """Draw the frames at `fps` in [start_s, end_s), `[n, side, side, 3]` uint8 RGB."""
        n = round((end_s - start_s) * fps)
        return np.stack([self.frame(start_s + i / fps, side) for i in range(n)])
