"""What is behind the shapes: plain, gradient and textured backgrounds with grey drifting blobs.

A `Scenery` is a frozen description drawn from a generator; `draw` is a pure function of it, the time and the
frame side. Blobs are small and grey, so that no background shows one of the named shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from protokv.mini.sprites import UNITS


@dataclass(frozen=True, slots=True)
class Blob:
    """A grey square that bounces inside the frame; side and position in world units, velocity in those per second."""

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
    """A random background: plain, gradient or textured, equally likely; none to two blobs."""
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
    """Share of each of `side` pixels that the interval [start, start + length) of world units covers."""
    edge = np.arange(side + 1, dtype=np.float32) * (UNITS / side)
    inside = np.clip(edge, start, start + length)
    share: NDArray[np.float32] = np.diff(inside) * (side / UNITS)
    return share


def draw(scenery: Scenery, time_s: float, side: int) -> NDArray[np.float32]:
    """The background at `time_s`, `[side, side, 3]` float32 in 0..255, a fresh array."""
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
