"""The things that exist in the procedural world: eight shapes, eight colours, nine places.

Everything else refers to them by index. Knows nothing of frames, time or words beyond these names.
"""

from __future__ import annotations

from typing import Final

SHAPES: Final = ("star", "ring", "square", "triangle", "cross", "disk", "diamond", "bar")

COLOURS: Final[dict[str, tuple[int, int, int]]] = {
    "red": (225, 40, 40),
    "green": (40, 190, 60),
    "blue": (50, 80, 235),
    "yellow": (240, 220, 40),
    "purple": (150, 50, 190),
    "orange": (250, 140, 20),
    "cyan": (50, 215, 225),
    "white": (250, 250, 250),
}

COLOUR_NAMES: Final = tuple(COLOURS)

# Row by row, three per row: place p is row p // 3, column p % 3 of the frame.
PLACES: Final = (
    "top left",
    "top",
    "top right",
    "left",
    "center",
    "right",
    "bottom left",
    "bottom",
    "bottom right",
)

NUMBERS: Final = ("zero", "one", "two", "three", "four")
"""Words for 0 to 4; no question counts further."""

PARTS: Final = ("start", "middle", "end")
"""The thirds of a stream."""

TENTHS: Final = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
"""The tenths of a stream, from its start."""
