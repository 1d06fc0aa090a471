"""Shapes that appear one to four times, each time in another colour and at another place.

Owns when and as what they appear. A minute has twelve slots of five seconds, and an appearance takes the first two or
three seconds of one, so that any two of them are at least two seconds apart and none crosses a full minute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from protokv.mini.events import BLOCK_S, Event, Pools, make_event, time_event

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
