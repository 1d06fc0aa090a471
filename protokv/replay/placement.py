"""What the evidence of a procedural stream is, and where it lies: after a while, or in a mixture, by the world's seed.

What comes first in a stream falls into free slots of a memory, and what comes later does not: with the evidence at the
start alone, a memory that averages everything which no longer fits looks as good as one that does not.
"""

from __future__ import annotations

from typing import Final, Literal

from protokv.mini.events import BLOCK_S

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
