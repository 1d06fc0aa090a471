"""The shapes, colours and places of the procedural world, and anti-aliased masks of the shapes.

Everything else refers to shapes, colours and places by their index. A sprite is drawn once as if the frame were 672
pixels wide and box-reduced to 84, 168, 336 or 672, so that a large frame, resized by area, equals the small one.
Positions are multiples of a quarter of a world unit.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

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

PLACES: Final = ("top left", "top", "top right", "left", "center", "right", "bottom left", "bottom", "bottom right")
"""Row by row: place p is row p // 3, column p % 3 of the frame."""

NUMBERS: Final = ("zero", "one", "two", "three", "four")
"""Words for 0 to 4, the highest count."""

PARTS: Final = ("start", "middle", "end")
"""The thirds of a stream."""

TENTHS: Final = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
"""The tenths of a stream, from its start."""

UNITS: Final = 84
"""The side of a frame in world units; one unit is one pixel of a training frame."""

GRID: Final = 672
SIDES: Final = (84, 168, 336, 672)
SIZES: Final = (18, 20, 22, 24)
"""Sprite sides in world units."""


def _polygon(points: list[tuple[float, float]], canvas: ImageDraw.ImageDraw, c: float, r: float) -> None:
    canvas.polygon([(c + r * x, c + r * y) for x, y in points], fill=1)


@lru_cache(maxsize=64)
def _drawn(shape: str, size: int) -> NDArray[np.float32]:
    side = size * GRID // UNITS
    image = Image.new("L", (side, side), 0)
    canvas = ImageDraw.Draw(image)
    c, r = side / 2, side / 2 - 1
    if shape in ("disk", "ring"):
        canvas.ellipse((c - r, c - r, c + r, c + r), fill=1)
        if shape == "ring":
            q = 0.55 * r
            canvas.ellipse((c - q, c - q, c + q, c + q), fill=0)
    elif shape == "square":
        q = 0.88 * r
        canvas.rectangle((c - q, c - q, c + q, c + q), fill=1)
    elif shape == "triangle":
        _polygon([(0, -1), (0.95, 0.85), (-0.95, 0.85)], canvas, c, r)
    elif shape == "diamond":
        _polygon([(0, -1), (0.7, 0), (0, 1), (-0.7, 0)], canvas, c, r)
    elif shape in ("cross", "bar"):
        q = 0.3 * r
        canvas.rectangle((c - q, c - r, c + q, c + r), fill=1)
        if shape == "cross":
            canvas.rectangle((c - r, c - q, c + r, c + q), fill=1)
    else:
        radii = [1.0 if i % 2 == 0 else 0.42 for i in range(10)]
        angles = [math.pi * i / 5 for i in range(10)]
        star = [(radius * math.sin(a), -radius * math.cos(a)) for radius, a in zip(radii, angles, strict=True)]
        _polygon(star, canvas, c, r)
    return np.asarray(image, np.float32)


@lru_cache(maxsize=4096)
def draw_mask(shape: int, size: int, side: int, quarter_x: int, quarter_y: int) -> NDArray[np.float32]:
    """Return the share of each pixel that the shape covers, `[(size + 1) * side / 84, same, 1]` float32 in [0, 1].

    `size` is in world units; `quarter_x`, `quarter_y` in 0..3 shift the sprite right and down by quarter units.
    """
    drawn = _drawn(SHAPES[shape], size)
    full = (size + 1) * GRID // UNITS
    step = GRID // UNITS // 4
    canvas = np.zeros((full, full), np.float32)
    y, x = quarter_y * step, quarter_x * step
    canvas[y : y + drawn.shape[0], x : x + drawn.shape[1]] = drawn
    factor = GRID // side
    n = full // factor
    mask: NDArray[np.float32] = canvas.reshape(n, factor, n, factor).mean((1, 3), dtype=np.float32)[..., None]
    mask.setflags(write=False)
    return mask


def paint(
    frame: NDArray[np.float32], shape: int, size: int, colour: tuple[float, float, float], x: float, y: float
) -> None:
    """Blend one shape into `frame [side, side, 3]` float32 in place; (x, y) is its centre in world units."""
    side = frame.shape[0]
    scale = side // UNITS
    # The corner of the sprite in quarter units, clamped so that the mask fits in the frame.
    left = min(max(round(4 * (x - size / 2)), 0), 4 * (UNITS - size))
    top = min(max(round(4 * (y - size / 2)), 0), 4 * (UNITS - size))
    mask = draw_mask(shape, size, side, left % 4, top % 4)
    x0, y0 = left // 4 * scale, top // 4 * scale
    region = frame[y0 : y0 + mask.shape[0], x0 : x0 + mask.shape[1]]
    cut = mask[: region.shape[0], : region.shape[1]]
    region += cut * (np.asarray(colour, np.float32) - region)
