"""Drifting noise with the spectrum of natural images: amplitude falls as one over spatial frequency.

Photographs of all kinds share that spectrum (Field 1987), so it is the second-order statistics of natural video that
this has, in brightness and a little in colour, and none of its objects. It is a tile that repeats without a seam,
drawn once and moved. A pure function of the seed, the time and the side of the frame.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from protokv.mini.sprites import GRID, UNITS

SPREAD: Final = 18.0
"""Standard deviation of brightness; that of colour is a quarter of it."""
FASTEST: Final = 6.0
"""World units a second that it drifts at most."""


def draw_noise(seed: tuple[int, int], time_s: float, side: int) -> NDArray[np.float32]:
    """What is added to a background at `time_s`, `[side, side, 3]` float32, mean 0."""
    tile, (across, down) = _tile(seed)
    # Whole pixels of the tile, so that every side of frame shows the same movement.
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
    """The tile at two pixels a world unit, `[2 * UNITS, 2 * UNITS, 3]`, and its velocity in world units a second."""
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
