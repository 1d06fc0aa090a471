"""Sparse videos in which what is asked about is shown twice: the same shapes, colours and places, in the same order.

Owns how such a video is laid out, and which questions about it have one answer, whichever showing is meant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from protokv.mini.questions import Fact
from samples.training.compose import Composer, Seen
from samples.training.order_curriculum import Scene
from samples.training.order_worlds import PLACES
from samples.training.sparse import SparseVideo, draw_clips, lay_out

ALL: Final = 0.6
"""Share of the videos in which everything is shown again; in the others, a part."""

PAIRS: Final = ("which_first", "which_last", "before", "after")
CLEAR_TWICE: Final = frozenset({"colour", "shape", "where", "at", "whether", "first", *PAIRS})
"""Types that ask the same of one showing and of two. When something was, or how many there were, is not among them."""


def make_repeated_video(rng: np.random.Generator, composer: Composer, scene: Scene, now: float) -> SparseVideo:
    """One video of `scene` whose events stand together, twice; without others, or only with one, a plain one."""
    events, others = draw_clips(rng, composer, scene)
    if len(others) < 2:
        return lay_out(rng, composer, scene, now, events, others)
    # At least one other is left outside, or what stands together would be shuffled.
    between = int(rng.integers(0, len(others)))
    again = events if rng.random() < ALL else [clip for clip in events if rng.random() < 0.5]
    together = [*events, *others[:between], *again]
    placed = replace(scene, place=scene.place or PLACES[int(rng.integers(len(PLACES)))])
    video = lay_out(rng, composer, placed, now, together, others[between:])
    shapes = {int(shape) for clip in again for shape in composer.events_of(clip)[:, 0]}
    return split_showings(video, shapes)


def split_showings(video: SparseVideo, shapes: set[int]) -> SparseVideo:
    """The video with the later events of these shapes as its repeats."""
    seen: set[int] = set()
    once: list[Seen] = []
    repeats: list[Seen] = []
    for event in video.events:
        (repeats if event.shape in seen else once).append(event)
        seen |= shapes & {event.shape}
    return replace(video, events=once, repeats=tuple(repeats))


def keep_clear(facts: Sequence[Fact], video: SparseVideo) -> list[Fact]:
    """The facts that are as true of the last showing of their events as of the first: no pair changes its order."""
    last = {event.shape: event.start_s for event in video.showings}

    def is_clear(fact: Fact) -> bool:
        if len(fact.evidence) != 2:
            return True
        one, other = (video.events[i] for i in fact.evidence)
        begins, ends = int(one.start_s) - int(other.start_s), int(last[one.shape]) - int(last[other.shape])
        return begins * ends > 0

    return [fact for fact in facts if is_clear(fact)] if video.repeats else list(facts)
