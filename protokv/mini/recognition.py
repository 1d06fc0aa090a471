"""Recognise pictures of the procedural world, so that an embedded model can tell what it was not trained on.

A picture is explained as the world draws it: a smooth dark background, on which every further pixel belongs to one of
at most a few compact shapes in the named colours (`protokv.mini.pictures`). Photographs, screens and test pictures
leave many pixels unexplained, or have a background that no world has. Each limit lies between what worlds show, also
re-encoded, rescaled, cropped or between bars, and what anything else shows. The model card has the errors.

Needs no torch. Equal pictures give equal results.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from protokv.mini.looked import Look
from protokv.mini.pictures import COLOURS

SIDE: Final = 42
"""Pictures are compared at this side: two world units a pixel."""

UNEXPLAINED: Final = 0.03
"""The share of unexplained pixels above which a picture is another one. Worlds as they are drawn stay below 0.01."""

TINT: Final = 48
"""A pixel is in a named colour if no channel is further away: tints differ by 12, codecs and edges by the rest."""

CORE: Final = 30
"""The median colour of a shape is this near to its name."""

EXTENT: Final = (6, 16)
"""The larger side of a shape in pixels: 18 to 24 world units, the edges left out, and more where a picture is cut."""

MOST_SHAPES: Final = 3
"""Shapes that are visible at once: two, and one that crosses."""

# Limits of the background: its level, which is drawn from 25..110, its slope, and how far brightness and colour stray
# from a plane; noise with the spectrum of photographs reaches 54 and 16. Neighbours differ by at most a number and a
# multiple of the spread of brightness: that noise by 1.9 times its spread, and letters by 3 times and more.
LEVEL: Final = (10.0, 124.0)
BRIGHTNESS: Final = 60.0
CHROMA: Final = 20.0
STEEPNESS: Final = (6.0, 2.0)
SLOPE: Final = 90.0

_AXIS = ((np.arange(SIDE) + 0.5) / SIDE - 0.5).astype(np.float32)
_PLANE = np.stack([np.ones((SIDE, SIDE), np.float32), *np.broadcast_arrays(_AXIS[None, :], _AXIS[:, None])], -1)
_PLANE = _PLANE.reshape(-1, 3)
_PALETTE = np.array(list(COLOURS.values()), np.float32)
_LEAST = SIDE * SIDE // 8  # pixels that a background needs

Picture = NDArray[np.float32]
"""`[SIDE, SIDE, 3]` float32 in 0..255."""


def look_at(image: NDArray[np.uint8]) -> Look:
    """Return what a frame `[height, width, 3]` uint8 RGB shows. Bars around a picture do not count as part of it."""
    found: Look = "other"
    for picture in _reduce(image):
        look = _explain(picture)
        if look == "shapes":
            return look
        found = look if look == "empty" else found
    return found


def _reduce(image: NDArray[np.uint8]) -> list[Picture]:
    """Return the frame at `SIDE`, and the frame without bars if there are any."""
    step = max(1, min(image.shape[:2]) // (3 * SIDE))
    shown = np.ascontiguousarray(image[::step, ::step])
    whole = Image.fromarray(shown)
    pictures = [_resize(whole, None)]
    height, width = shown.shape[:2]
    top, bottom = _bar(shown), _bar(shown[::-1])
    turned = shown.transpose(1, 0, 2)
    left, right = _bar(turned), _bar(turned[::-1])
    if top or bottom or left or right:
        # One more pixel, which the codec mixes with the bar.
        box = (left and left + 1, top and top + 1, width - (right and right + 1), height - (bottom and bottom + 1))
        if min(box[2] - box[0], box[3] - box[1]) >= SIDE:
            pictures.append(_resize(whole, box))
    return pictures


def _resize(image: Image.Image, box: tuple[int, int, int, int] | None) -> Picture:
    return np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BOX, box=box), np.float32)


def _bar(rows: NDArray[np.uint8]) -> int:
    """Return the number of first rows in one colour, less than half of them."""
    level, most = rows[0, 0].astype(np.int16), len(rows) * 9 // 20
    for n in range(most):
        if np.abs(rows[n] - level).max() > 12:
            return n
    return most


def _explain(picture: Picture) -> Look:
    pixels = picture.reshape(-1, 3)
    shapes, n_shapes = _find_shapes(pixels)
    if n_shapes > MOST_SHAPES:
        return "other"
    background = ~_grow(shapes)
    if background.sum() < _LEAST:
        return "other"
    used = background
    for _ in range(3):
        plane = _PLANE[used]
        fitted = np.linalg.solve(plane.T @ plane + 1e-3 * np.eye(3, dtype=np.float32), plane.T @ pixels[used])
        rest = pixels - _PLANE @ fitted
        brightness = rest.mean(1)
        chroma = np.abs(rest - brightness[:, None]).max(1)
        used = background & (np.abs(brightness) < BRIGHTNESS) & (chroma < CHROMA)
        if used.sum() < _LEAST:
            return "other"
    unexplained = 1 - used.sum() / background.sum()
    steepness = _steepness(brightness.reshape(SIDE, SIDE), background.reshape(SIDE, SIDE))
    is_world = (
        unexplained <= UNEXPLAINED
        and LEVEL[0] <= fitted[0].min()
        and fitted[0].max() <= LEVEL[1]
        and np.abs(fitted[1:]).max() <= SLOPE
        and steepness <= STEEPNESS[0] + STEEPNESS[1] * brightness[used].std()
    )
    if not is_world:
        return "other"
    return "shapes" if n_shapes else "empty"


def _find_shapes(pixels: NDArray[np.float32]) -> tuple[NDArray[np.bool_], int]:
    """Return which of the pixels `[SIDE * SIDE, 3]` belong to shapes, and the number of shapes."""
    shapes, n = np.zeros(len(pixels), bool), 0
    for colour in _PALETTE:
        (places,) = np.nonzero((np.abs(pixels - colour) <= TINT).all(1))
        if len(places) < EXTENT[0]:
            continue
        rows, columns = np.divmod(places, SIDE)
        reach = EXTENT[1] // 2 + 1
        near = (np.abs(rows - np.median(rows)) <= reach) & (np.abs(columns - np.median(columns)) <= reach)
        places, rows, columns = places[near], rows[near], columns[near]
        extent = 0 if not len(places) else 1 + max(np.ptp(rows), np.ptp(columns))
        core = np.median(pixels[places], 0) if len(places) else colour
        if EXTENT[0] <= extent <= EXTENT[1] and np.abs(core - colour).max() <= CORE:
            shapes[places] = True
            n += 1
    return shapes, n


def _grow(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the mask `[SIDE * SIDE]` with the two pixels around it, where colours mix."""
    grown = mask.reshape(SIDE, SIDE).copy()
    for _ in range(2):
        last = grown.copy()
        grown[1:] |= last[:-1]
        grown[:-1] |= last[1:]
        grown[:, 1:] |= last[:, :-1]
        grown[:, :-1] |= last[:, 1:]
    return grown.reshape(-1)


def _steepness(brightness: NDArray[np.float32], background: NDArray[np.bool_]) -> float:
    """Return the difference of neighbours that one pair in 50 exceeds."""
    down = np.abs(np.diff(brightness, axis=0))[background[1:] & background[:-1]]
    across = np.abs(np.diff(brightness, axis=1))[background[:, 1:] & background[:, :-1]]
    both = np.concatenate([down, across])
    return float(np.partition(both, len(both) * 49 // 50)[len(both) * 49 // 50])
