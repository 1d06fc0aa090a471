"""Events of the procedural world: a coloured shape that appears at a place.

Draws events from a random generator; knows nothing of backgrounds or frames. Most last 1 to 4
seconds. At most two of these are visible at once, and they differ in shape, colour and place. The
centre of a moving shape stays in the cell where it appeared, so "where was it" has one answer.

Evidence may last for minutes. No single step shows a crossing shape move: it moves steadily on a
straight line from the middle of one cell to the middle of another cell two rows or columns away. In
events it is a chain, one event a cell; each begins where and when the previous one ends. Such an
event may last longer than 4 seconds and cross the border of a block. Counted shapes appear one to
four times, each time in another colour and at another place. A minute has twelve slots of five
seconds, and an appearance takes the first two or three seconds of a slot. So two appearances are at
least two seconds apart, and none crosses a full minute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final, TypeVar

import numpy as np

from samples.worlds.pictures import COLOUR_NAMES, COLOURS, PLACES, SHAPES, SIZES, UNITS

BLOCK_S: Final = 60
"""Seconds that are generated together."""

LONGEST_S: Final = 4
CELL: Final = UNITS / 3
ROAM: Final = 11.0
"""How far a moving shape may stray from the centre of its cell, in world units (half a cell is
14).
"""


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Event:
    """One appearance, visible in [start_s, end_s).

    Attributes:
        shape, colour, place: indices into the palette (`pictures`).
        start_s, end_s: seconds from the start of the stream.
        size: side of the sprite, in world units.
        tint: the painted RGB colour.
        offset: (x, y) from the centre of the cell at `start_s`, in world units.
        velocity: in world units per second.
        roam: how far the centre may stray from the centre of the cell.
    """

    shape: int
    colour: int
    place: int
    start_s: float
    end_s: float
    size: int
    tint: tuple[float, float, float]
    offset: tuple[float, float] = (0.0, 0.0)
    velocity: tuple[float, float] = (0.0, 0.0)
    roam: float = field(default=ROAM, repr=False)

    def later(self, by_s: float) -> Event:
        """Return the same event `by_s` seconds later."""
        return replace(self, start_s=self.start_s + by_s, end_s=self.end_s + by_s)

    def centre(self, time_s: float) -> tuple[float, float]:
        """Return the centre (x, y) in world units at `time_s`; motion stops `roam` units from the
        cell's centre.
        """
        row, column = divmod(self.place, 3)
        passed = time_s - self.start_s
        dx = min(max(self.offset[0] + self.velocity[0] * passed, -self.roam), self.roam)
        dy = min(max(self.offset[1] + self.velocity[1] * passed, -self.roam), self.roam)
        return CELL * (column + 0.5) + dx, CELL * (row + 0.5) + dy


@dataclass(frozen=True, slots=True)
class Pools:
    """The shapes, colours and places that events may be drawn from."""

    shapes: tuple[int, ...]
    colours: tuple[int, ...]
    places: tuple[int, ...]

    @staticmethod
    def everything() -> Pools:
        """Return all shapes, colours and places."""
        return Pools(
            tuple(range(len(SHAPES))), tuple(range(len(COLOUR_NAMES))), tuple(range(len(PLACES)))
        )


def make_event(
    rng: np.random.Generator,
    look: tuple[int, int, int],
    start_s: float,
    end_s: float,
    moving: float,
    slack: float = 0.0,
) -> Event:
    """Draw an event with the `look` (shape, colour, place); size, tint, offset and motion are
    random.

    The share `moving` moves. `slack`: world units that the shape may stick out of its cell where it
    starts.
    """
    size = SIZES[int(rng.integers(len(SIZES)))]
    r, g, b = (
        float(v) for v in np.asarray(COLOURS[COLOUR_NAMES[look[1]]]) + rng.uniform(-12, 12, 3)
    )
    room = (CELL - size) / 2 + slack
    x, y = (float(v) for v in rng.uniform(-room, room, 2))
    velocity = (0.0, 0.0)
    if rng.random() < moving:
        angle = rng.uniform(0, 2 * np.pi)
        speed = rng.uniform(1.5, 4.5)
        velocity = (float(speed * np.cos(angle)), float(speed * np.sin(angle)))
    return Event(*look, start_s, end_s, size, (r, g, b), (x, y), velocity)


def split_pools(rng: np.random.Generator, n: int) -> tuple[Pools, Pools]:
    """Split shapes, colours and places: `n` of each for the evidence, the others for distracting
    events.

    One shape is in neither pool, so that "did it appear?" can be answered with no.
    """
    shapes, colours, places = (
        tuple(int(v) for v in rng.permutation(k))
        for k in (len(SHAPES), len(COLOUR_NAMES), len(PLACES))
    )
    return Pools(shapes[:n], colours[:n], places[:n]), Pools(shapes[n:-1], colours[n:], places[n:])


def time_event(rng: np.random.Generator, start_s: int, end_s: int) -> tuple[float, float]:
    """Delay the start of a quarter of the events of two seconds or more by half a second."""
    late = end_s - start_s >= 2 and rng.random() < 0.25
    return start_s + 0.5 * late, float(end_s)


def place_evidence_events(
    rng: np.random.Generator, pools: Pools, end_s: int, moving: float
) -> tuple[Event, ...]:
    """Draw one event per entry of `pools`, at separate times inside [0, end_s)."""
    n = len(pools.shapes)
    slot = end_s // n
    found = []
    for i in range(n):
        length = int(rng.integers(2, min(LONGEST_S, slot - 1) + 1))
        start = i * slot + int(rng.integers(0, slot - length))
        look = (pools.shapes[i], pools.colours[i], pools.places[i])
        found.append(make_event(rng, look, *time_event(rng, start, start + length), moving))
    return tuple(found)


def scatter_events(
    rng: np.random.Generator,
    pools: Pools,
    start_s: int,
    end_s: int,
    per_minute: float,
    moving: float,
    overlap: float,
    models: Sequence[Event] = (),
    similarity: float = 0.0,
    taken: Callable[[int, int], set[int]] = lambda start_s, end_s: set(),
) -> tuple[Event, ...]:
    """Draw events that start at random whole seconds of [start_s, end_s) and end by end_s.

    The share `overlap` may still be visible when the next event begins. Looks come from `pools`;
    seven in ten events prefer a shape, colour and place that have not appeared since start_s. The
    share `similarity` has the colour and the place of one of the `models`, and a shape of the
    pools. Places in `taken(start_s, end_s)` are avoided.
    """
    seconds = end_s - start_s
    n = min(int(per_minute * seconds / 60 + rng.random()), max(seconds - 1, 0))
    starts = [start_s + int(s) for s in np.sort(rng.permutation(max(seconds - 1, 0))[:n])]
    found: list[Event] = []
    for i, start in enumerate(starts):
        following = starts[i + 1] if i + 1 < n else end_s
        second_next = starts[i + 2] if i + 2 < n else end_s
        end = min(start + int(rng.integers(1, LONGEST_S + 1)), second_next)
        if rng.random() >= overlap:
            end = min(end, following)
        still = [e for e in found[-2:] if e.end_s > start]
        fresh = rng.random() < 0.7
        shown = found if fresh else []
        look = (
            _pick(rng, pools.shapes, {e.shape for e in still}, {e.shape for e in shown}),
            _pick(rng, pools.colours, {e.colour for e in still}, {e.colour for e in shown}),
            _pick(
                rng,
                pools.places,
                {e.place for e in still} | taken(start, end),
                {e.place for e in shown},
            ),
        )
        # Drawn last and only if wanted, so that worlds without it stay the same.
        if similarity and rng.random() < similarity:
            apart = [
                m for m in models if all(m.colour != e.colour and m.place != e.place for e in still)
            ]
            if apart:
                model = apart[int(rng.integers(len(apart)))]
                look = (look[0], model.colour, model.place)
        found.append(make_event(rng, look, *time_event(rng, start, end), moving))
    return tuple(found)


def _pick(
    rng: np.random.Generator, pool: tuple[int, ...], never: set[int], rather_not: set[int]
) -> int:
    allowed = [v for v in pool if v not in never] or list(pool)
    fresh = [v for v in allowed if v not in rather_not]
    choice = fresh or allowed
    return choice[int(rng.integers(len(choice)))]


MOST_SHAPES: Final = 3
MOST_TIMES: Final = 4
SLOT_S: Final = 5
LINES: Final = tuple(
    (a, b)
    for a in range(len(PLACES))
    for b in range(len(PLACES))
    if max(abs(a // 3 - b // 3), abs(a % 3 - b % 3)) == 2
)
"""From where to where a shape may cross the picture, as indices of places."""


def deal(seed: int, kind: int, values: Sequence[T], n: int = 1) -> list[T]:
    """Return `n` of the values for a seed, such that seeds that follow each other get each value
    equally often.

    So no answer to a study's questions is much more frequent than the others. `kind` tells
    different draws apart.
    """
    cards = math.lcm(len(values), n)
    group, place = divmod(seed, cards // n)
    order = np.random.default_rng([group, kind]).permutation(cards)
    return [values[card % len(values)] for card in order[place * n : (place + 1) * n].tolist()]


def draw_crossing(
    rng: np.random.Generator,
    line: tuple[int, int],
    shape: int,
    colour: int,
    start_s: int,
    end_s: int,
) -> tuple[Event, ...]:
    """Draw a crossing in [start_s, end_s) of one of `LINES`; its size and tint are random."""
    first, last = line
    event = make_event(rng, (shape, colour, first), start_s, end_s, moving=0.0)
    return cross(replace(event, offset=(0.0, 0.0)), last)


def cross(event: Event, last: int) -> tuple[Event, ...]:
    """Return the chain of an event that moves steadily from the middle of its cell to the middle of
    cell `last`.
    """
    (row, column), (last_row, last_column) = divmod(event.place, 3), divmod(last, 3)
    line = (last_column - column, last_row - row)
    length_s = event.end_s - event.start_s
    # The shares of the line at which it crosses the border of a cell, in either direction.
    borders = {(k + 0.5) / steps for steps in map(abs, line) for k in range(steps)}
    found = []
    for begins, ends in pairwise(sorted({0.0, 1.0} | borders)):
        # The cell that it is in halfway through this part.
        done = (begins + ends) / 2
        x, y = (int(math.copysign(math.floor(abs(steps) * done + 0.5), steps)) for steps in line)
        found.append(
            replace(
                event,
                place=3 * (row + y) + column + x,
                start_s=event.start_s + begins * length_s,
                end_s=event.start_s + ends * length_s,
                offset=(CELL * (line[0] * begins - x), CELL * (line[1] * begins - y)),
                velocity=(CELL * line[0] / length_s, CELL * line[1] / length_s),
                roam=CELL / 2,
            )
        )
    return tuple(found)


def find_touched(crossing: Sequence[Event], start_s: float, end_s: float) -> set[int]:
    """Return the places that a crossing shape touches between two times that are close to each
    other.
    """
    found = set()
    for event in crossing:
        if event.start_s < end_s and event.end_s > start_s:
            for time_s in (max(start_s, event.start_s), min(end_s, event.end_s)):
                x, y = event.centre(time_s)
                (left, right), (top, bottom) = (
                    (int((v - event.size / 2) // CELL), int((v + event.size / 2) // CELL))
                    for v in (x, y)
                )
                found |= {
                    3 * row + column
                    for row in range(top, bottom + 1)
                    for column in range(left, right + 1)
                }
    return found


def draw_counted(
    rng: np.random.Generator,
    shapes: Sequence[int],
    pools: Pools,
    times: Sequence[int],
    minutes: range,
    moving: float,
    taken: Callable[[int, int], set[int]],
) -> tuple[Event, ...]:
    """Draw all appearances of counted shapes, in order of time.

    Each shape appears as often as `times` says, spread over as many `minutes` as possible. Colours
    and places come from `pools`; places in `taken(start_s, end_s)` are avoided if possible.
    """
    slots = {minute: rng.permutation(BLOCK_S // SLOT_S).tolist() for minute in minutes}
    found = []
    for shape, n in zip(shapes, times, strict=True):
        colours = rng.permutation(pools.colours).tolist()
        places = rng.permutation(pools.places).tolist()
        order = rng.permutation(minutes)
        for k in range(n):
            minute = int(order[k % len(order)])
            start = BLOCK_S * minute + SLOT_S * int(slots[minute].pop())
            end = start + int(rng.integers(2, 4))
            place = next((place for place in places if place not in taken(start, end)), places[0])
            places.remove(place)
            found.append(
                make_event(rng, (shape, colours.pop(), place), *time_event(rng, start, end), moving)
            )
    return tuple(sorted(found, key=lambda event: event.start_s))
