"""Sparse videos with recurring shapes, and with a shape that crosses the picture slowly.

Draws how often a shape appears, and the path and the tokens of a crossing. A crossing is a chain of
events of one look, one a cell; each begins when the previous one ends. It is composed of stored
steps of single events, so the shape is always inside a cell.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from samples.training.clips import SINGLE
from samples.training.compose import Composer, Seen
from samples.training.model import TOKENS
from samples.training.order_curriculum import Scene
from samples.training.sparse import SparseVideo, draw_clips, lay_out
from samples.worlds.pictures import COLOUR_NAMES, PLACES, SHAPES
from samples.worlds.questions import MOST_COUNTED

Array = NDArray[np.int64]
RECURRING: Final = 0.6
"""Share of the shapes asked about that appear more than once."""
SPREAD: Final = 0.75
"""Share of the videos in which the recurring events are scattered among the others."""

SHORTEST_CROSSING: Final = 16
LONGEST_CROSSING: Final = 240
FEWEST_SHOWN: Final = 0.08
"""Smallest share of the steps of a crossing that are shown; the share is drawn from here to 1."""


def make_recurring_video(
    rng: np.random.Generator, composer: Composer, scene: Scene, now: float, crossing: float
) -> SparseVideo:
    """Make a video of `scene` with recurring shapes; with probability `crossing`, a shape crosses
    the picture.
    """
    events, others = draw_clips(rng, composer, scene)
    again: list[int] = []
    for clip in events:
        if composer.bank.kind[clip] == SINGLE and rng.random() < RECURRING:
            again += draw_again(rng, composer, clip, int(rng.integers(1, MOST_COUNTED)))
    if others and rng.random() < SPREAD:
        others = [*others, *again]
        others = [others[i] for i in rng.permutation(len(others))]
    else:
        events = [*events, *again]
        events = [events[i] for i in rng.permutation(len(events))]
    video = lay_out(rng, composer, scene, now, events, others)
    return cross(rng, composer, video) if rng.random() < crossing else video


def draw_again(rng: np.random.Generator, composer: Composer, clip: int, n: int) -> list[int]:
    """Draw up to n further clips with the shape of `clip`, all of different colours and at
    different places.
    """
    looks = composer.looks
    shape, colour, place = composer.events_of(clip)[0, :3].tolist()
    left = composer.by_shape[shape]
    found: list[int] = []
    while True:
        left = left[(looks[left, 1] != colour) & (looks[left, 2] != place)]
        if len(found) == n or not len(left):
            return found
        number = int(left[rng.integers(len(left))])
        found.append(int(composer.by_kind[SINGLE][number]))
        _, colour, place = looks[number].tolist()


def draw_way(rng: np.random.Generator) -> list[int]:
    """Draw a path of two to five cells, each beside the previous one, diagonally too."""
    start, end = (int(cell) for cell in rng.choice(len(PLACES), 2, replace=False))
    corners = rng.random() < 0.5
    way = [start]
    while way[-1] != end:
        here = divmod(way[-1], 3)
        down, right = (int(np.sign(a - b)) for a, b in zip(divmod(end, 3), here, strict=True))
        if corners and down and right:
            down, right = (down, 0) if rng.random() < 0.5 else (0, right)
        way.append(way[-1] + 3 * down + right)
    return way


def cross(rng: np.random.Generator, composer: Composer, video: SparseVideo) -> SparseVideo:
    """Add a new shape that crosses the picture; return the video unchanged if there is no room."""
    taken = {event.shape for event in video.events}
    free = [shape for shape in range(len(SHAPES)) if shape not in taken]
    if not free or video.span < SHORTEST_CROSSING:
        return video
    shape = free[int(rng.integers(len(free)))]
    colour = int(rng.integers(len(COLOUR_NAMES)))
    longest = min(LONGEST_CROSSING, video.span)
    length = round(math.exp(rng.uniform(math.log(SHORTEST_CROSSING), math.log(longest))))
    start = int(rng.integers(0, video.span - length + 1))
    way = draw_way(rng)
    pools = [_find_rows(composer, shape, colour, cell) for cell in way]
    if not all(len(pool) for pool in pools):
        return video
    borders = start + np.linspace(0, length, len(way) + 1).round().astype(np.int64)
    events = [
        Seen(shape, colour, cell, float(borders[i]), float(borders[i + 1]))
        for i, cell in enumerate(way)
    ]
    shown = rng.random(length) < math.exp(rng.uniform(math.log(FEWEST_SHOWN), 0))
    # Show the start of each event, the end of the last one, and all of the last steps, which are
    # whole.
    shown[borders[:-1] - start] = True
    shown[max(0, _whole_from(video) - start) :] = True
    shown[-1] = True
    times = start + np.flatnonzero(shown)
    number = np.searchsorted(borders, times, side="right") - 1
    rows = np.array([pools[i][int(rng.integers(len(pools[i])))] for i in number])
    return _add(video, rows, times, np.array(way)[number], events)


def _add(
    video: SparseVideo, rows: Array, times: Array, cells: Array, events: list[Seen]
) -> SparseVideo:
    """Add lit tokens to the video, except where an event is in the same cell at the same time."""
    key = video.times * TOKENS + video.cells
    own = times * TOKENS + cells
    visible = ~np.isin(own, key[video.lit])
    kept = video.lit | ~np.isin(key, own)
    columns = (
        np.concatenate([old[kept], new[visible]])
        for old, new in (
            (video.rows, rows),
            (video.times, times),
            (video.cells, cells),
            (video.lit, np.ones(len(times), np.bool_)),
        )
    )
    order = np.argsort(np.concatenate([key[kept], own[visible]]))
    rows, times, cells, lit = (column[order] for column in columns)
    together = sorted([*video.events, *events], key=lambda event: event.start_s)
    slow = frozenset(event.shape for event in events)
    return replace(video, rows=rows, times=times, cells=cells, lit=lit, events=together, slow=slow)


def _whole_from(video: SparseVideo) -> int:
    """Return the first of the last steps that are shown whole."""
    times, n = np.unique(video.times, return_counts=True)
    whole = video.span - 1
    while whole > 0 and n[times == whole - 1].sum() == TOKENS:
        whole -= 1
    return whole


def _find_rows(composer: Composer, shape: int, colour: int, place: int) -> Array:
    """Return the rows of the bank that show this look alone."""
    alike = composer.by_shape[shape]
    clips = composer.by_kind[SINGLE][alike[(composer.looks[alike, 1:] == (colour, place)).all(1)]]
    bank = composer.bank
    rows = [np.arange(bank.first[clip], bank.first[clip] + bank.length[clip]) for clip in clips]
    return np.concatenate(rows) if rows else np.zeros(0, np.int64)
