"""A stage that takes a second, the size of its models, and a video whose tokens are all known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from samples.training.compose import Seen
from samples.training.curriculum import Stage
from samples.training.sparse import SparseVideo
from samples.worlds.pictures import SHAPES

SMALL = {"layers": 1}


def tiny(**changes) -> Stage:
    stage = Stage(
        name="tiny",
        steps=30,
        rate=2e-3,
        spans=((1, 1),),
        events=(1, 2),
        weights={"whether": 1.0, "colour": 1.0},
        tokens=1200,
        warm_up=5,
    )
    return replace(stage, **changes)


STAR, RING, BAR = (SHAPES.index(name) for name in ("star", "ring", "bar"))


def make_video() -> SparseVideo:
    """A star at second 2, a ring and a bar at 5, the star again at 9; unlit tokens between; 12
    steps.
    """
    events = [
        Seen(STAR, 0, 4, 2.0, 4.0),
        Seen(RING, 1, 0, 5.0, 6.0),
        Seen(BAR, 2, 8, 5.0, 7.0),
        Seen(STAR, 3, 4, 9.0, 10.0),
    ]
    tokens = [(2, 4), (3, 4), (4, 1), (5, 0), (5, 8), (6, 8), (9, 4), (11, 2)]
    times, cells = np.array(tokens).T
    lit = np.array([True, True, False, True, True, True, True, False])
    return SparseVideo(np.zeros(8, np.int64), times, cells, lit, events, 12)
