"""Backgrounds: plain, gradient or textured with small grey drifting blobs, and noise with a natural spectrum.

A `Scenery` is a frozen description; `draw` is a pure function of it, the time and the side of the frame. Blobs are
small and grey, so that no background shows one of the named shapes. The noise has the spectrum of natural images,
amplitude falling as one over spatial frequency (Field 1987), in brightness and a little in colour: the second-order
statistics of natural video without its objects. It is a tile that repeats without a seam, drawn once and moved.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from protokv.mini.sprites import GRID, UNITS


@dataclass(frozen=True, slots=True)
class Blob:
    """A grey square that bounces inside the frame; lengths in world units, velocity in world units per second."""

    side: float
    grey: float
    x: float
    y: float
    velocity_x: float
    velocity_y: float


@dataclass(frozen=True, slots=True)
class Scenery:
    """One background: a base colour, a linear gradient, a sine texture (amplitude 0 for none) and blobs."""

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
    x, y = axis[None, :], axis[:, None]
    ramp = np.cos(scenery.angle) * (x - 0.5) + np.sin(scenery.angle) * (y - 0.5)
    wave = scenery.amplitude * np.sin(scenery.frequency * x + scenery.phase) * np.sin(scenery.frequency * y)
    picture = np.asarray(scenery.base, np.float32) + ramp[..., None] * np.asarray(scenery.gradient, np.float32)
    still: NDArray[np.float32] = (picture + wave[..., None]).astype(np.float32)
    still.setflags(write=False)
    return still


def _bounce(position: float, room: float) -> float:
    return abs(position % (2 * room) - room)


def _covered(start: float, length: float, side: int) -> NDArray[np.float32]:
    """Return the share of each of `side` pixels that [start, start + length) in world units covers."""
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
        across, down = _covered(x, blob.side, side), _covered(y, blob.side, side)
        columns, rows = np.flatnonzero(across), np.flatnonzero(down)
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
    """Return the tile, two pixels a world unit, `[2 * UNITS, 2 * UNITS, 3]`, and its velocity in units per second."""
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
    angle, speed = rng.uniform(0, 2 * np.pi), rng.uniform(0, FASTEST)
    return tile, (float(speed * np.cos(angle)), float(speed * np.sin(angle)))
