"""Where in a procedural stream its evidence lies: after a while, or in a mixture of places, a place for each world.

What comes first in a stream falls into free slots of a memory, and what comes later does not: with the evidence at the
start alone, a memory that averages everything which no longer fits looks as good as one that does not.
"""

from __future__ import annotations

from typing import Final, Literal

from protokv.mini.events import BLOCK_S

Before = int | Literal["mix"]
"""Seconds of distraction before the evidence, or "mix"."""

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
