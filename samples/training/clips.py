"""Short rendered clips and dense single steps: the pictures of training.

The functions of the world paint them, so that a composed training video looks like a streamed
world. They also get sensor noise, which the world lacks, so that the model reads compressed video
too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from samples.worlds.events import Event, make_event
from samples.worlds.pictures import UNITS, Scenery, draw, make_scenery, paint

SINGLE: Final = 0
OVERLAPPING: Final = 1
SIMULTANEOUS: Final = 2
EMPTY: Final = 3
DENSE: Final = 4
EMPTY_STEPS: Final = 8


@dataclass(frozen=True, slots=True)
class Clip:
    """A rendered clip: frames `[L, 2, 84, 84, 3]` uint8, and events with times in steps from the
    start of the clip.
    """

    kind: int
    frames: NDArray[np.uint8]
    events: tuple[Event, ...]


def _render(
    rng: np.random.Generator, sceneries: Sequence[Scenery], events: Sequence[Event]
) -> NDArray[np.uint8]:
    """Draw the frames of one step for each scenery, with noise in two thirds of the clips."""
    steps = len(sceneries)
    frames = np.empty((2 * steps, UNITS, UNITS, 3), np.float32)
    for i in range(2 * steps):
        frames[i] = draw(sceneries[i // 2], i / 2, UNITS)
        for event in events:
            if event.start_s <= i / 2 < event.end_s:
                x, y = event.centre(i / 2)
                paint(frames[i], event.shape, event.size, event.tint, x, y)
    if rng.random() < 0.66:
        noise = rng.standard_normal((2 * steps, UNITS, UNITS, 1), dtype=np.float32)
        frames += noise * np.float32(rng.uniform(0, 8))
    whole: NDArray[np.uint8] = np.clip(frames + 0.5, 0, 255).astype(np.uint8)
    return whole.reshape(steps, 2, UNITS, UNITS, 3)


def make_dense_step(rng: np.random.Generator) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Draw one step with up to nine objects at any phase of their motion, some of them in one of
    the two frames only.

    Returns frames `[2, 84, 84, 3]` and labels `[9, 2]`: shape + 1 and colour + 1 of each cell, 0
    for an empty cell.
    """
    labels = np.zeros((9, 2), np.int64)
    share = (0.1, 0.3, 0.65)[int(rng.integers(3))]
    slack = 4.0 if rng.random() < 0.3 else 0.0
    events = []
    for place in range(9):
        if rng.random() > share:
            continue
        shape = int(rng.integers(8))
        colour = int(rng.integers(8))
        when = rng.random()
        begin, end = (0.0, 1.0) if when > 0.15 else (0.0, 0.5) if when > 0.05 else (0.5, 1.0)
        moving = 0.5 if share < 0.5 else 0.15
        event = make_event(rng, (shape, colour, place), begin, end, moving, slack)
        passed = float(rng.uniform(0, 3.5))
        x = event.offset[0] + event.velocity[0] * passed
        y = event.offset[1] + event.velocity[1] * passed
        events.append(
            Event(shape, colour, place, begin, end, event.size, event.tint, (x, y), event.velocity)
        )
        labels[place] = shape + 1, colour + 1
    return _render(rng, [make_scenery(rng)], events)[0], labels


def make_clip(
    rng: np.random.Generator, kind: int, moving: float = 0.35, cuts: float = 0.25
) -> Clip:
    """Draw a clip of one kind; the share `cuts` of the clips changes its background between two
    steps.
    """
    longest = int(rng.integers(1, 5)) if rng.random() < 0.3 else int(rng.integers(2, 5))
    if kind == EMPTY:
        spans = []
        length = EMPTY_STEPS
    elif kind == SINGLE:
        length = longest
        spans = [(0, length)]
    elif kind == OVERLAPPING:
        first = max(longest, 2)
        begin = min(int(rng.integers(1, 3)), first - 1)
        end = int(rng.integers(max(begin + 1, first), first + 3))
        length = max(first, end)
        spans = [(0, first), (begin, end)]
    elif kind == SIMULTANEOUS:
        length = min(longest, 3)
        spans = [(0, length), (0, length)]
    else:
        length = 1
        spans = [(0, 1)] * int(rng.integers(2, 7))
    shapes = rng.permutation(8)
    colours = rng.permutation(8)
    places = rng.permutation(9)
    events = []
    for i, (begin, end) in enumerate(spans):
        late = 0.5 if end - begin > 1 and rng.random() < 0.25 else 0.0
        look = (int(shapes[i]), int(colours[i]), int(places[i]))
        events.append(make_event(rng, look, begin + late, float(end), moving))
    scenery = make_scenery(rng)
    sceneries = [scenery] * length
    if length > 1 and rng.random() < cuts:
        cut = int(rng.integers(1, length))
        sceneries = [scenery] * cut + [make_scenery(rng)] * (length - cut)
    return Clip(kind, _render(rng, sceneries, events), tuple(events))
