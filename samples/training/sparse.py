"""Sparse training videos: the lit tokens of many events in a long span, and a few of the unlit
ones.

Unlit tokens carry little, and a long video has thousands of them; the shown ones stand for all.
Chooses the clips of a video, their times, and the tokens to show.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from samples.training.clips import OVERLAPPING, SINGLE
from samples.training.compose import Composer, Seen
from samples.training.model import TOKENS
from samples.training.order_curriculum import Scene
from samples.training.order_worlds import PLACES

Array = NDArray[np.int64]
MOST_AMONG_OTHERS = 6
"""Most events beside others: of the eight shapes, the others need one, and one is in no event."""


@dataclass(frozen=True, slots=True)
class SparseVideo:
    """Tokens of one video in order of time and cell, all `[N]`: rows of the bank, times, cells,
    lit.

    Attributes:
        rows, times, cells, lit: as above.
        events: in order of start.
        span: steps.
        slow: shapes that cross the picture slowly; their events are a chain.
        repeats: second showings of events; not part of `events`.
    """

    rows: Array
    times: Array
    cells: Array
    lit: NDArray[np.bool_]
    events: list[Seen]
    span: int
    slow: frozenset[int] = frozenset()
    repeats: tuple[Seen, ...] = ()

    @property
    def showings(self) -> list[Seen]:
        """Return events and repeats in order of start."""
        return sorted((*self.events, *self.repeats), key=lambda event: event.start_s)


def draw_clips(
    rng: np.random.Generator, composer: Composer, scene: Scene
) -> tuple[list[int], list[int]]:
    """Draw clips to ask about, all of different shapes, and others that share no shape with
    them.
    """
    n_events, n_others = (
        int(rng.integers(least, most + 1)) for least, most in (scene.events, scene.others)
    )
    n_events = min(n_events, MOST_AMONG_OTHERS) if n_others else n_events
    looks = composer.looks
    single = composer.by_kind[SINGLE]
    pairs = composer.by_kind[OVERLAPPING]
    events: list[int] = []
    # Shapes, colours and places in use.
    taken: tuple[set[int], set[int], set[int]] = (set(), set(), set())

    def take(clip: int, found: Array) -> None:
        events.append(clip)
        for look in found.tolist():
            for attribute, value in zip(taken, look, strict=True):
                attribute.add(value)

    while len(taken[0]) < n_events:
        if len(taken[0]) + 2 <= n_events and rng.random() < 0.15:
            clip = int(pairs[rng.integers(len(pairs))])
            found = composer.events_of(clip)[:, :3]
            if taken[0].isdisjoint(found[:, 0].tolist()):
                take(clip, found)
            continue
        for attempt in range(5):
            number = int(rng.integers(len(looks)))
            shape, colour, place = looks[number].tolist()
            # Repeat a colour or a place only if no other clip is found.
            if shape not in taken[0] and (
                attempt == 4 or not (colour in taken[1] or place in taken[2])
            ):
                take(int(single[number]), looks[number : number + 1])
                break
    others: list[int] = []
    if n_others:
        free = [shape for shape in range(8) if shape not in taken[0]]
        never = free[int(rng.integers(len(free)))]
        free = [shape for shape in free if shape != never] or free
        by_shape = composer.by_shape
        while len(others) < n_others:
            choice = by_shape[free[int(rng.integers(len(free)))]]
            number = int(choice[rng.integers(len(choice))])
            _, colour, place = looks[number].tolist()
            if (colour in taken[1] or place in taken[2]) and rng.random() < 0.9:
                continue
            others.append(int(single[number]))
    return [events[i] for i in rng.permutation(len(events))], others


def _line_up(
    rng: np.random.Generator, events: list[int], others: list[int], place: str
) -> tuple[list[int], int, int]:
    """Return the clips in order, and the range [first, last) of the events among them (0, 0: they
    are mixed).
    """
    if place == "mix":
        clips = events + others
        return [clips[i] for i in rng.permutation(len(clips))], 0, 0
    before = {"start": 0, "end": len(others), "middle": int(rng.integers(0, len(others) + 1))}[
        place
    ]
    return [*others[:before], *events, *others[before:]], before, before + len(events)


def _free_before(rng: np.random.Generator, free: int, n: int, first: int, last: int) -> Array:
    """Draw how many of `free` steps lie before each of n clips; clips [first, last) are mostly
    close together.
    """
    if last == first or rng.random() >= 0.6:
        return np.sort(rng.integers(0, free + 1, n))
    inside = int(min(free, rng.uniform(0, 15) * (last - first)))
    outside = free - inside
    border = int(rng.integers(0, outside + 1))
    return np.concatenate(
        [
            np.sort(rng.integers(0, border + 1, first)),
            border + np.sort(rng.integers(0, inside + 1, last - first)),
            border + inside + np.sort(rng.integers(0, outside - border + 1, n - last)),
        ]
    )


def make_sparse_video(
    rng: np.random.Generator, composer: Composer, scene: Scene, now: float
) -> SparseVideo:
    """Make a video of `scene`; `now` is the probability that it ends with an event."""
    return lay_out(rng, composer, scene, now, *draw_clips(rng, composer, scene))


def lay_out(
    rng: np.random.Generator,
    composer: Composer,
    scene: Scene,
    now: float,
    events: list[int],
    others: list[int],
) -> SparseVideo:
    """Make a video of these clips with gaps between them; see `make_sparse_video`."""
    bank = composer.bank
    place = "mix"
    if others:
        place = scene.place or ("mix" if rng.random() < 0.35 else PLACES[int(rng.integers(3))])
    clips, first, last = _line_up(rng, events, others, place)
    lengths = np.array([bank.length[c] for c in clips])
    for i, clip in enumerate(clips):
        if bank.kind[clip] == SINGLE and rng.random() >= 0.6:
            lengths[i] = rng.integers(1, lengths[i] + 1)
    low, high = scene.span
    low = max(low, int(lengths.sum()) + 1)
    span = round(math.exp(rng.uniform(math.log(low), math.log(max(high, low)))))
    free = span - int(lengths.sum())
    starts = _free_before(rng, free, len(clips), first, last)
    if rng.random() < now:
        starts[-1] = free
    starts = starts + np.cumsum(lengths) - lengths
    return _show(rng, composer, clips, starts, lengths, span)


def _show(
    rng: np.random.Generator,
    composer: Composer,
    clips: list[int],
    starts: Array,
    lengths: Array,
    span: int,
) -> SparseVideo:
    """Show lit tokens (of half of the clips only some steps), all tokens of the last steps, and
    some others.
    """
    bank = composer.bank
    events: list[Seen] = []
    parts: list[tuple[Array, Array, Array, NDArray[np.bool_]]] = []
    held = np.zeros(span, np.bool_)
    unlit_share = rng.uniform(0, 0.06) if rng.random() < 0.85 else rng.uniform(0, 0.5)
    whole_from = span - (2 if rng.random() < 0.3 else 1)
    for clip, start, length in zip(clips, starts.tolist(), lengths.tolist(), strict=True):
        rows = bank.first[clip] + np.arange(length)
        held[start : start + length] = True
        lit = bank.lit[rows]
        shown = lit | (rng.random(lit.shape) < unlit_share)
        found = [
            Seen(
                s,
                c,
                p,
                float(start + min(b, length - 1)),
                float(start + max(min(e, length), min(b, length - 1) + 1)),
            )
            for s, c, p, b, e in composer.events_of(clip).tolist()
        ]
        events += found
        if rng.random() < 0.5:
            # The steps in which events begin are always shown.
            some = rng.random((length, 1)) < 0.6
            some[[int(event.start_s) - start for event in found]] = True
            shown &= some
        shown[max(0, whole_from - start) :] = True
        step, cell = np.nonzero(shown)
        parts.append((rows[step], start + step, cell, lit[step, cell]))
    for time in range(max(0, whole_from), span):
        if not held[time]:
            row = composer.blank[rng.integers(len(composer.blank))]
            parts.append(
                (
                    np.full(TOKENS, row),
                    np.full(TOKENS, time),
                    np.arange(TOKENS),
                    np.zeros(TOKENS, np.bool_),
                )
            )
    times = np.unique(rng.integers(0, span, int(rng.integers(4, 16))))
    times = times[~held[times] & (times < whole_from)]
    blank = composer.blank[rng.integers(0, len(composer.blank), len(times))]
    parts.append(
        (blank, times, rng.integers(0, TOKENS, len(times)), np.zeros(len(times), np.bool_))
    )
    rows, times, cells, lit = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.lexsort((cells, times))
    events.sort(key=lambda event: event.start_s)
    return SparseVideo(rows[order], times[order], cells[order], lit[order], events, span)
