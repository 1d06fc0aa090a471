"""A shape that crosses the picture so slowly that no single step shows it move.

Slow change, as a bar that fills is: the model of this world sees shapes and places, so what changes is the place of a
shape. It moves steadily along a straight line from the middle of one cell to that of another two rows or columns away,
through those between. In events it is a chain: one a cell, each of which begins where and when the one before it ends.
Unlike any other event, one of these may last longer than 4 seconds and lie across the border of a block.

Shapes that appear one to four times, each time in another colour and at another place.

Owns when and as what they appear. A minute has twelve slots of five seconds, and an appearance takes the first two or
three seconds of one, so that any two of them are at least two seconds apart and none crosses a full minute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

import numpy as np

from protokv.mini.events import BLOCK_S, CELL, Event, Pools, make_event, time_event
from protokv.mini.sprites import PLACES


def draw_crossing(rng: np.random.Generator, shape: int, colour: int, start_s: int, end_s: int) -> tuple[Event, ...]:
    """A chain in [start_s, end_s) of this shape and colour; where it goes, its size and tint are random."""
    ways = [(a, b) for a in range(len(PLACES)) for b in range(len(PLACES)) if max(_steps(a, b)) == 2]
    first, last = ways[int(rng.integers(len(ways)))]
    looks = make_event(rng, (shape, colour, first), start_s, end_s, moving=0.0)
    return cross(replace(looks, offset=(0.0, 0.0)), last)


def cross(event: Event, last: int) -> tuple[Event, ...]:
    """What `event`, which begins in the middle of its cell, is if it moves steadily to the middle of cell `last`."""
    (row, column), (last_row, last_column) = divmod(event.place, 3), divmod(last, 3)
    way = (last_column - column, last_row - row)
    length_s = event.end_s - event.start_s
    # The shares of the way at which the border of a cell is crossed, in either direction.
    borders = {(k + 0.5) / steps for steps in map(abs, way) for k in range(steps)}
    found = []
    for begins, ends in pairwise(sorted({0.0, 1.0} | borders)):
        # Half of the rows and columns that are between lie behind it in the middle of this part of the way.
        done = (begins + ends) / 2
        x, y = (int(math.copysign(math.floor(abs(steps) * done + 0.5), steps)) for steps in way)
        found.append(
            replace(
                event,
                place=3 * (row + y) + column + x,
                start_s=event.start_s + begins * length_s,
                end_s=event.start_s + ends * length_s,
                offset=(CELL * (way[0] * begins - x), CELL * (way[1] * begins - y)),
                velocity=(CELL * way[0] / length_s, CELL * way[1] / length_s),
                roam=CELL / 2,
            )
        )
    return tuple(found)


def find_touched(crossing: Sequence[Event], start_s: float, end_s: float) -> set[int]:
    """The places that the shape of a chain touches between two times that are close to each other."""
    found = set()
    for event in crossing:
        if event.start_s < end_s and event.end_s > start_s:
            for time_s in (max(start_s, event.start_s), min(end_s, event.end_s)):
                x, y = event.centre(time_s)
                (left, right), (top, bottom) = (
                    (int((v - event.size / 2) // CELL), int((v + event.size / 2) // CELL)) for v in (x, y)
                )
                found |= {3 * row + column for row in range(top, bottom + 1) for column in range(left, right + 1)}
    return found


def _steps(one: int, other: int) -> tuple[int, int]:
    """How many rows and columns are between two places."""
    return abs(one // 3 - other // 3), abs(one % 3 - other % 3)


MOST_SHAPES: Final = 3
MOST_TIMES: Final = 4
SLOT_S: Final = 5


def draw_counted(
    rng: np.random.Generator,
    shapes: Sequence[int],
    pools: Pools,
    minutes: range,
    moving: float,
    taken: Callable[[int, int], set[int]],
) -> tuple[Event, ...]:
    """All appearances in order of time.

    Each shape appears in as many different ones of the `minutes` as it can, with colours and places of `pools`, where
    possible at none of the places that are `taken` in [start_s, end_s).
    """
    slots = {minute: rng.permutation(BLOCK_S // SLOT_S).tolist() for minute in minutes}
    found = []
    for shape in shapes:
        colours, places = rng.permutation(pools.colours).tolist(), rng.permutation(pools.places).tolist()
        order = rng.permutation(minutes)
        for k in range(int(rng.integers(1, MOST_TIMES + 1))):
            minute = int(order[k % len(order)])
            start = BLOCK_S * minute + SLOT_S * int(slots[minute].pop())
            end = start + int(rng.integers(2, 4))
            place = next((place for place in places if place not in taken(start, end)), places[0])
            places.remove(place)
            found.append(make_event(rng, (shape, colours.pop(), place), *time_event(rng, start, end), moving))
    return tuple(sorted(found, key=lambda event: event.start_s))
