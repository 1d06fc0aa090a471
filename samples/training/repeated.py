"""Sparse videos that show the events asked about twice: the same shapes, colours and places, in the
same order.

Lays out such a video, and finds the questions with the same answer for both showings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from samples.training.compose import Composer, Seen
from samples.training.order_curriculum import Scene
from samples.training.order_worlds import PLACES
from samples.training.sparse import SparseVideo, draw_clips, lay_out
from samples.worlds.questions import Fact

ALL: Final = 0.6
"""Share of the videos that repeat all events; the others repeat a part."""

PAIRS: Final = ("which_first", "which_last", "before", "after")
CLEAR_TWICE: Final = frozenset({"colour", "shape", "where", "at", "whether", "first", *PAIRS})
"""Types with the same answer for one showing and for two; times and counts are not among them."""


def make_repeated_video(
    rng: np.random.Generator, composer: Composer, scene: Scene, now: float
) -> SparseVideo:
    """Make a video of `scene` with its events together, twice; a plain one if there are fewer than
    two others.
    """
    events, others = draw_clips(rng, composer, scene)
    if len(others) < 2:
        return lay_out(rng, composer, scene, now, events, others)
    # Leave at least one other outside, or the events that belong together would be shuffled.
    between = int(rng.integers(0, len(others)))
    again = events if rng.random() < ALL else [clip for clip in events if rng.random() < 0.5]
    together = [*events, *others[:between], *again]
    placed = replace(scene, place=scene.place or PLACES[int(rng.integers(len(PLACES)))])
    video = lay_out(rng, composer, placed, now, together, others[between:])
    shapes = {int(shape) for clip in again for shape in composer.events_of(clip)[:, 0]}
    return split_showings(video, shapes)


def split_showings(video: SparseVideo, shapes: set[int]) -> SparseVideo:
    """Make the later events of these shapes the repeats of the video."""
    seen: set[int] = set()
    once: list[Seen] = []
    repeats: list[Seen] = []
    for event in video.events:
        (repeats if event.shape in seen else once).append(event)
        seen |= shapes & {event.shape}
    return replace(video, events=once, repeats=tuple(repeats))


def keep_clear(facts: Sequence[Fact], video: SparseVideo) -> list[Fact]:
    """Return the facts that hold for the first and for the last showing: no pair changes its
    order.
    """
    last = {event.shape: event.start_s for event in video.showings}

    def is_clear(fact: Fact) -> bool:
        if len(fact.evidence) != 2:
            return True
        one, other = (video.events[i] for i in fact.evidence)
        begins = int(one.start_s) - int(other.start_s)
        ends = int(last[one.shape]) - int(last[other.shape])
        return begins * ends > 0

    return [fact for fact in facts if is_clear(fact)] if video.repeats else list(facts)
