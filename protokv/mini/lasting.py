"""Evidence that lasts for minutes: a shape that crosses the picture slowly, and shapes that appear several times.

No single step shows a crossing shape move. It moves steadily on a straight line from the middle of one cell to the
middle of another cell two rows or columns away. In events it is a chain, one event a cell; each begins where and when
the previous one ends. Such an event may last longer than 4 seconds and cross the border of a block.

Counted shapes appear one to four times, each time in another colour and at another place. A minute has twelve slots of
five seconds, and an appearance takes the first two or three seconds of a slot. So two appearances are at least two
seconds apart, and none crosses a full minute.
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

MOST_SHAPES: Final = 3
MOST_TIMES: Final = 4
SLOT_S: Final = 5


def draw_crossing(rng: np.random.Generator, shape: int, colour: int, start_s: int, end_s: int) -> tuple[Event, ...]:
    """Draw a crossing in [start_s, end_s) with this shape and colour; its line, size and tint are random."""
    lines = [(a, b) for a in range(len(PLACES)) for b in range(len(PLACES)) if max(_steps(a, b)) == 2]
    first, last = lines[int(rng.integers(len(lines)))]
    event = make_event(rng, (shape, colour, first), start_s, end_s, moving=0.0)
    return cross(replace(event, offset=(0.0, 0.0)), last)


def cross(event: Event, last: int) -> tuple[Event, ...]:
    """Return the chain of an event that moves steadily from the middle of its cell to the middle of cell `last`."""
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
    """Return the places that a crossing shape touches between two times that are close to each other."""
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
    """Return the rows and the columns between two places."""
    return abs(one // 3 - other // 3), abs(one % 3 - other % 3)


def draw_counted(
    rng: np.random.Generator,
    shapes: Sequence[int],
    pools: Pools,
    minutes: range,
    moving: float,
    taken: Callable[[int, int], set[int]],
) -> tuple[Event, ...]:
    """Draw all appearances of counted shapes, in order of time.

    The appearances of a shape are spread over as many `minutes` as possible. Colours and places come from `pools`;
    places in `taken(start_s, end_s)` are avoided if possible.
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
