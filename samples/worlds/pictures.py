"""The pictures of the procedural world: its shapes, colours and places, masks of the shapes, and
backgrounds.

Everything else refers to shapes, colours and places by their index. A sprite is drawn once as if
the frame were 672 pixels wide and box-reduced to 84, 168, 336 or 672, so that a large frame,
resized by area, equals the small one. Positions are multiples of a quarter of a world unit.

Backgrounds are plain, gradient or textured with small grey drifting blobs, and noise with a natural
spectrum. A `Scenery` is a frozen description; `draw` is a pure function of it, the time and the
side of the frame. Blobs are small and grey, so that no background shows one of the named shapes.
The noise has the spectrum of natural images, amplitude falling as one over spatial frequency (Field
1987), in brightness and a little in colour: the second-order statistics of natural video without
its objects. It is a tile that repeats without a seam, drawn once and moved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
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


def _polygon(
    points: list[tuple[float, float]], canvas: ImageDraw.ImageDraw, c: float, r: float
) -> None:
    canvas.polygon([(c + r * x, c + r * y) for x, y in points], fill=1)


@lru_cache(maxsize=64)
def _drawn(shape: str, size: int) -> NDArray[np.float32]:
    side = size * GRID // UNITS
    image = Image.new("L", (side, side), 0)
    canvas = ImageDraw.Draw(image)
    c = side / 2
    r = side / 2 - 1
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
        star = [
            (radius * math.sin(a), -radius * math.cos(a))
            for radius, a in zip(radii, angles, strict=True)
        ]
        _polygon(star, canvas, c, r)
    return np.asarray(image, np.float32)


@lru_cache(maxsize=4096)
def draw_mask(
    shape: int, size: int, side: int, quarter_x: int, quarter_y: int
) -> NDArray[np.float32]:
    """Return the share of each pixel that the shape covers, `[(size + 1) * side / 84, same, 1]`
    float32 in [0, 1].

    `size` is in world units; `quarter_x`, `quarter_y` in 0..3 shift the sprite right and down by
    quarter units.
    """
    drawn = _drawn(SHAPES[shape], size)
    full = (size + 1) * GRID // UNITS
    step = GRID // UNITS // 4
    canvas = np.zeros((full, full), np.float32)
    y = quarter_y * step
    x = quarter_x * step
    canvas[y : y + drawn.shape[0], x : x + drawn.shape[1]] = drawn
    factor = GRID // side
    n = full // factor
    mask: NDArray[np.float32] = canvas.reshape(n, factor, n, factor).mean((1, 3), dtype=np.float32)[
        ..., None
    ]
    mask.setflags(write=False)
    return mask


def paint(
    frame: NDArray[np.float32],
    shape: int,
    size: int,
    colour: tuple[float, float, float],
    x: float,
    y: float,
) -> None:
    """Blend one shape into `frame [side, side, 3]` float32 in place; (x, y) is its centre in world
    units.
    """
    side = frame.shape[0]
    scale = side // UNITS
    # The corner of the sprite in quarter units, clamped so that the mask fits in the frame.
    left = min(max(round(4 * (x - size / 2)), 0), 4 * (UNITS - size))
    top = min(max(round(4 * (y - size / 2)), 0), 4 * (UNITS - size))
    mask = draw_mask(shape, size, side, left % 4, top % 4)
    x0 = left // 4 * scale
    y0 = top // 4 * scale
    region = frame[y0 : y0 + mask.shape[0], x0 : x0 + mask.shape[1]]
    cut = mask[: region.shape[0], : region.shape[1]]
    region += cut * (np.asarray(colour, np.float32) - region)


@dataclass(frozen=True, slots=True)
class Blob:
    """A grey square that bounces inside the frame; lengths in world units, velocity in world units
    per second.
    """

    side: float
    grey: float
    x: float
    y: float
    velocity_x: float
    velocity_y: float


@dataclass(frozen=True, slots=True)
class Scenery:
    """One background: a base colour, a linear gradient, a sine texture (amplitude 0 for none) and
    blobs.
    """

    base: tuple[float, float, float]
    gradient: tuple[float, float, float]
    angle: float
    amplitude: float
    frequency: float
    phase: float
    blobs: tuple[Blob, ...]


def make_scenery(rng: np.random.Generator) -> Scenery:
    """Draw a random background: plain, gradient or textured, equally likely; up to two blobs."""
    r, g, b = (float(v) for v in rng.uniform(25, 110, 3))
    kind = int(rng.integers(3))
    slope = tuple(float(v) for v in rng.uniform(-50, 50, 3)) if kind == 1 else (0.0, 0.0, 0.0)
    blobs = tuple(
        Blob(
            side=float(rng.uniform(2, 5)),
            grey=float(rng.uniform(90, 150)),
            x=float(rng.uniform(0, 2 * UNITS)),
            y=float(rng.uniform(0, 2 * UNITS)),
            velocity_x=float(rng.uniform(-3, 3)),
            velocity_y=float(rng.uniform(-3, 3)),
        )
        for _ in range(int(rng.integers(3)))
    )
    return Scenery(
        base=(r, g, b),
        gradient=(slope[0], slope[1], slope[2]),
        angle=float(rng.uniform(0, 2 * np.pi)),
        amplitude=10.0 if kind == 2 else 0.0,
        frequency=float(rng.uniform(9, 27)),
        phase=float(rng.uniform(0, 2 * np.pi)),
        blobs=blobs,
    )


@lru_cache(maxsize=16)
def _still(scenery: Scenery, side: int) -> NDArray[np.float32]:
    axis = (np.arange(side, dtype=np.float32) + 0.5) / side
    x = axis[None, :]
    y = axis[:, None]
    ramp = np.cos(scenery.angle) * (x - 0.5) + np.sin(scenery.angle) * (y - 0.5)
    wave = (
        scenery.amplitude
        * np.sin(scenery.frequency * x + scenery.phase)
        * np.sin(scenery.frequency * y)
    )
    picture = np.asarray(scenery.base, np.float32) + ramp[..., None] * np.asarray(
        scenery.gradient, np.float32
    )
    still: NDArray[np.float32] = (picture + wave[..., None]).astype(np.float32)
    still.setflags(write=False)
    return still


def _bounce(position: float, room: float) -> float:
    return abs(position % (2 * room) - room)


def _covered(start: float, length: float, side: int) -> NDArray[np.float32]:
    """Return the share of each of `side` pixels that [start, start + length) in world units
    covers.
    """
    edge = np.arange(side + 1, dtype=np.float32) * (UNITS / side)
    inside = np.clip(edge, start, start + length)
    share: NDArray[np.float32] = np.diff(inside) * (side / UNITS)
    return share


def draw(scenery: Scenery, time_s: float, side: int) -> NDArray[np.float32]:
    """Return the background at `time_s`, `[side, side, 3]` float32 in 0..255, a new array."""
    frame = _still(scenery, side).copy()
    for blob in scenery.blobs:
        room = UNITS - blob.side
        x = _bounce(blob.x + blob.velocity_x * time_s, room)
        y = _bounce(blob.y + blob.velocity_y * time_s, room)
        across = _covered(x, blob.side, side)
        down = _covered(y, blob.side, side)
        columns = np.flatnonzero(across)
        rows = np.flatnonzero(down)
        box = np.s_[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        mask = (down[rows, None] * across[None, columns])[..., None]
        frame[box] += mask * (blob.grey - frame[box])
    return frame


SPREAD: Final = 18.0
"""Standard deviation of brightness; colour has a quarter of it."""
FASTEST: Final = 6.0
"""The highest drift of the noise, in world units per second."""


def draw_noise(seed: tuple[int, int], time_s: float, side: int) -> NDArray[np.float32]:
    """Return the noise to add to a background at `time_s`, `[side, side, 3]` float32, mean 0."""
    tile, (across, down) = _tile(seed)
    # Whole pixels of the tile, so that frames of every side show the same movement.
    shift = (round(down * time_s * 2), round(across * time_s * 2))
    moved = np.roll(tile, shift, (0, 1))
    if side <= len(tile):
        factor = len(tile) // side
        shown = moved.reshape(side, factor, side, factor, 3).mean((1, 3), dtype=np.float32)
    else:
        shown = moved.repeat(side // len(tile), 0).repeat(side // len(tile), 1)
    found: NDArray[np.float32] = shown
    return found


@lru_cache(maxsize=64)
def _tile(seed: tuple[int, int]) -> tuple[NDArray[np.float32], tuple[float, float]]:
    """Return the tile, two pixels a world unit, `[2 * UNITS, 2 * UNITS, 3]`, and its velocity in
    units per second.
    """
    rng = np.random.default_rng([seed[0], 6, seed[1]])
    side = 2 * UNITS
    assert GRID % side == 0
    frequency = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side)[None, :])
    frequency[0, 0] = np.inf
    planes = []
    for spread in (SPREAD, SPREAD / 4, SPREAD / 4, SPREAD / 4):
        white = np.fft.rfft2(rng.standard_normal((side, side)))
        plane = np.fft.irfft2(white / frequency, s=(side, side))
        planes.append(plane * (spread / plane.std()))
    tile = (planes[0][..., None] + np.stack(planes[1:], -1)).astype(np.float32)
    tile.setflags(write=False)
    angle = rng.uniform(0, 2 * np.pi)
    speed = rng.uniform(0, FASTEST)
    return tile, (float(speed * np.cos(angle)), float(speed * np.sin(angle)))
