"""Procedural video streams of any length in which every event is known.

A `World` is a pure function of its `WorldConfig`: scenes and events are made in blocks of `BLOCK_S` seconds from
(seed, block), so what happens at time t does not depend on the length of the stream. No event crosses a block
border. Knows nothing of questions, files or models, and needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from protokv.errors import ConfigError
from protokv.mini.events import BLOCK_S, Event, Pools, place_evidence, scatter_events, split_pools
from protokv.mini.scenery import Scenery, draw, make_scenery
from protokv.mini.sprites import SIDES, paint

TRAINING_SIDE: Final = 84
MAX_EVIDENCE: Final = 4


@dataclass(frozen=True, slots=True)
class WorldConfig:
    """Everything a stream is made from. All shares are fractions in [0, 1].

    With `evidence_events` = 0, events come at `events_per_minute` from the start. With 1 to 4 of them, the mode is
    "evidence first": that many events, all different, lie in the first `evidence_s` seconds; after that,
    distracting events come at `events_per_minute`, with shapes, colours and places that the evidence does not
    have (and one shape that never appears), so that questions about the evidence stay unambiguous.
    """

    seed: int = 0
    length_s: int = 60
    events_per_minute: float = 10.0
    moving: float = 0.3
    overlap: float = 0.25
    cut_s: tuple[int, int] | None = (6, 20)
    evidence_events: int = 0
    evidence_s: int = 60

    def __post_init__(self) -> None:
        """Raise ConfigError where a field is out of range."""
        if self.length_s < 1:
            raise ConfigError(f"expected length_s of at least 1 second, got {self.length_s}")
        if not 0 <= self.events_per_minute <= 40:
            raise ConfigError(f"expected events_per_minute in 0..40, got {self.events_per_minute}")
        for name in ("moving", "overlap"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"expected {name} in 0..1, got {getattr(self, name)}")
        if self.cut_s is not None and not 1 <= self.cut_s[0] <= self.cut_s[1] <= BLOCK_S:
            raise ConfigError(f"expected cut_s as 1 <= shortest <= longest <= {BLOCK_S}, got {self.cut_s}")
        if not 0 <= self.evidence_events <= MAX_EVIDENCE:
            raise ConfigError(f"expected evidence_events in 0..{MAX_EVIDENCE}, got {self.evidence_events}")
        if self.evidence_events and not 4 * self.evidence_events <= self.evidence_s <= BLOCK_S:
            raise ConfigError(
                f"expected evidence_s in {4 * self.evidence_events}..{BLOCK_S} for "
                f"{self.evidence_events} events, got {self.evidence_s}"
            )


@dataclass(frozen=True, slots=True)
class Scene:
    """A part of the stream with one background: [start_s, end_s), cut at whole seconds."""

    start_s: int
    end_s: int
    scenery: Scenery


@lru_cache(maxsize=256)
def _scenes(config: WorldConfig, block: int) -> tuple[Scene, ...]:
    if config.cut_s is None:
        # One background for the whole stream, whichever block is asked for.
        return (Scene(0, config.length_s, make_scenery(np.random.default_rng([config.seed, 1]))),)
    shortest, longest = config.cut_s
    rng = np.random.default_rng([config.seed, 1, block])
    start, end = block * BLOCK_S, (block + 1) * BLOCK_S
    scenes = []
    while start < end:
        cut = start + int(rng.integers(shortest, longest + 1))
        if end - cut < shortest:
            cut = end
        scenes.append(Scene(start, cut, make_scenery(rng)))
        start = cut
    return tuple(scenes)


@lru_cache(maxsize=256)
def _events(config: WorldConfig, block: int) -> tuple[Event, ...]:
    rng = np.random.default_rng([config.seed, 2, block])
    start_s, pools = block * BLOCK_S, Pools.everything()
    found: tuple[Event, ...] = ()
    if config.evidence_events:
        evidence, pools = split_pools(np.random.default_rng([config.seed, 3]), config.evidence_events)
        if block == 0:
            found = place_evidence(rng, evidence, config.evidence_s, config.moving)
            start_s = config.evidence_s
    end_s = (block + 1) * BLOCK_S
    rate = config.events_per_minute
    return found + scatter_events(rng, pools, start_s, end_s, rate, config.moving, config.overlap)


class World:
    """One procedural stream: `events_until`, `visible`, `scene` and `frame` at any time of it."""

    def __init__(self, config: WorldConfig | None = None) -> None:
        self.config = config or WorldConfig()

    def events(self) -> Iterator[Event]:
        """Every event of the stream in order of start; the last may reach beyond the end of the stream."""
        for block in range(-(-self.config.length_s // BLOCK_S)):
            yield from (e for e in _events(self.config, block) if e.start_s < self.config.length_s)

    def events_until(self, time_s: float) -> list[Event]:
        """The events that have begun to appear before `time_s`, in order of start."""
        found = []
        for event in self.events():
            if event.start_s >= time_s:
                break
            found.append(event)
        return found

    def visible(self, time_s: float) -> list[Event]:
        """The events whose shape is in the frame at `time_s`."""
        block = int(time_s // BLOCK_S)
        return [e for e in _events(self.config, block) if e.start_s <= time_s < e.end_s]

    def scene(self, time_s: float) -> Scene:
        """The scene at `time_s`."""
        scenes = _scenes(self.config, int(time_s // BLOCK_S))
        return next((s for s in scenes if time_s < s.end_s), scenes[-1])

    def frame(self, time_s: float, side: int = TRAINING_SIDE) -> NDArray[np.uint8]:
        """The frame at `time_s`, `[side, side, 3]` uint8 RGB; a pure function of (config, time_s, side).

        84, 168, 336 and 672 are drawn anti-aliased; any other side is area-resized from the next larger of them.
        """
        native = next((s for s in SIDES if s >= side), SIDES[-1])
        scene = self.scene(time_s)
        picture = draw(scene.scenery, time_s - scene.start_s, native)
        for event in self.visible(time_s):
            x, y = event.centre(time_s)
            paint(picture, event.shape, event.size, event.tint, x, y)
        frame: NDArray[np.uint8] = np.clip(picture + 0.5, 0, 255).astype(np.uint8)
        if native != side:
            how = Image.Resampling.BOX if side < native else Image.Resampling.BICUBIC
            frame = np.asarray(Image.fromarray(frame).resize((side, side), how))
        return frame

    def frames(self, start_s: float, end_s: float, fps: float = 2.0, side: int = TRAINING_SIDE) -> NDArray[np.uint8]:
        """The frames sampled at `fps` in [start_s, end_s), `[n, side, side, 3]` uint8 RGB."""
        n = round((end_s - start_s) * fps)
        return np.stack([self.frame(start_s + i / fps, side) for i in range(n)])
