"""The curriculum of content: the videos, questions and masks of each language stage, in order.

Pure data. A stage ends after `steps` optimiser steps, or earlier if training accuracy by type over
100 steps reaches its gate. The order matters. Dense scenes in large batches come first, because
without them the model names any object that is present. "first" is learned before "last" is added,
because together they cancel each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage.

    Attributes:
        steps: optimiser steps at most.
        rate, rate_end, warm_up: learning rate, the rate at the end of its decay, and the steps of
            its rise.
        spans: (steps of video, steps kept); a batch draws one pair. Only steps without evidence are
            left out, and positions keep the gaps.
        events: fewest and most in a video.
        weights, weights_end: share of each question type at the start, and after 60 % of the stage.
        tokens, questions: tokens of a batch, questions about a video.
        dense_objects: fewest and most objects in a video of one step.
        window, longest_window: share of batches whose visual tokens see the last steps only, and
            most of such steps.
        far: share of batches whose visual tokens see a window and some older tokens.
        drop: share of batches in which part of the past without evidence is hidden from the
            question.
        shift: share of videos whose positions are shifted by up to 700.
        many, most: share of videos with up to `most` events. One to four of these are asked about,
            and the others share no shape, colour or place with them.
        repeat, pairs: share of draws that may repeat a look, and that show two events at once.
        now: share of videos that end with an event.
        gate, gate_times: accuracy by type that ends the stage, and number of records in a row that
            must reach it.
        phrasing: type -> its only phrasing.
        oppose_last: start with the embedding of "last" set to minus that of "first".
    """

    name: str
    steps: int
    rate: float
    spans: tuple[tuple[int, int], ...]
    events: tuple[int, int]
    weights: Mapping[str, float]
    rate_end: float | None = None
    tokens: int = 4000
    questions: int = 8
    weights_end: Mapping[str, float] = field(default_factory=dict)
    dense_objects: tuple[int, int] = (1, 4)
    window: float = 0.0
    far: float = 0.0
    longest_window: int = 16
    drop: float = 0.0
    shift: float = 0.15
    many: float = 0.0
    most: int = 24
    repeat: float = 0.0
    pairs: float = 0.25
    now: float = 0.35
    warm_up: int = 30
    gate: Mapping[str, float] = field(default_factory=dict)
    gate_times: int = 1
    phrasing: Mapping[str, int] = field(default_factory=dict)
    oppose_last: bool = False


_CONTENT: Final = {"colour": 1.0, "where": 1.0, "whether": 1.0, "shape": 1.0, "at": 1.0}

_ALL: Final = {
    "first": 1.2,
    "last": 1.2,
    "which_first": 1.3,
    "which_last": 1.3,
    "shape": 0.9,
    "at": 0.9,
    "colour": 0.6,
    "where": 1.0,
    "whether": 0.9,
    "now": 0.5,
    "anything_now": 0.25,
    "count": 2.2,
}

_LATE: Final = _ALL | {
    "at": 1.8,
    "where": 0.8,
    "now": 0.9,
    "anything_now": 0.4,
    "which_first": 1.5,
    "which_last": 1.5,
}
"""Weights of the two long stages: types that are learned slowly are asked more often."""

CURRICULUM: Final = (
    Stage(
        name="dense",
        steps=1300,
        rate=2e-3,
        warm_up=100,
        spans=((1, 1),),
        dense_objects=(1, 3),
        events=(1, 2),
        questions=5,
        tokens=6500,
        shift=0.3,
        weights=_CONTENT,
        gate={"colour": 0.95, "where": 0.95, "whether": 0.9},
    ),
    Stage(
        name="content",
        steps=1500,
        rate=2e-3,
        spans=((1, 1), (2, 2), (4, 4), (8, 8)),
        dense_objects=(2, 4),
        events=(1, 3),
        questions=6,
        tokens=5000,
        window=0.3,
        far=0.1,
        shift=0.3,
        pairs=0.1,
        weights={"colour": 0.7, "where": 1.0, "whether": 1.2, "shape": 1.3, "at": 1.3},
        gate={"colour": 0.97, "where": 0.97, "shape": 0.93, "at": 0.93, "whether": 0.95},
    ),
    Stage(
        name="first",
        steps=900,
        rate=2e-3,
        spans=((4, 4), (6, 6), (8, 8)),
        events=(2, 2),
        questions=5,
        shift=0.0,
        weights={
            "first": 4.0,
            "shape": 0.8,
            "at": 0.8,
            "colour": 0.3,
            "where": 0.3,
            "whether": 0.3,
        },
        gate={"first": 0.95},
    ),
    Stage(
        name="last",
        steps=1500,
        rate=2e-3,
        spans=((4, 4), (6, 6), (8, 8)),
        events=(2, 2),
        questions=7,
        tokens=3600,
        window=0.4,
        far=0.2,
        longest_window=8,
        shift=0.0,
        weights={
            "first": 2.5,
            "last": 2.0,
            "which_first": 0.3,
            "which_last": 0.3,
            "shape": 0.5,
            "at": 0.7,
            "colour": 0.3,
            "where": 0.7,
            "whether": 0.3,
        },
        weights_end={"first": 2.0, "last": 2.0, "which_first": 0.7, "which_last": 0.7},
        phrasing={"first": 0, "last": 0, "which_first": 0, "which_last": 0},
        oppose_last=True,
        gate={"first": 0.95, "last": 0.93},
        gate_times=2,
    ),
    Stage(
        name="time",
        steps=1000,
        rate=1.8e-3,
        spans=((4, 4), (8, 8), (8, 8), (12, 12), (16, 16)),
        events=(1, 3),
        questions=7,
        window=0.4,
        far=0.2,
        weights={
            "first": 1.7,
            "last": 1.7,
            "which_first": 1.0,
            "which_last": 1.0,
            "shape": 0.6,
            "at": 0.7,
            "colour": 0.3,
            "where": 0.9,
            "whether": 0.4,
            "now": 0.5,
            "anything_now": 0.3,
            "count": 0.8,
        },
    ),
    Stage(
        name="grow",
        steps=1200,
        rate=1.8e-3,
        spans=((4, 4), (8, 8), (12, 12), (16, 16), (24, 24), (32, 20), (64, 24)),
        events=(1, 5),
        window=0.5,
        far=0.3,
        drop=0.35,
        repeat=0.2,
        weights=_ALL,
    ),
    Stage(
        name="many",
        steps=1500,
        rate=1.5e-3,
        spans=((8, 8), (16, 16), (24, 24), (32, 24), (64, 32), (128, 36), (256, 40), (640, 48)),
        events=(1, 6),
        tokens=4500,
        window=0.45,
        far=0.3,
        drop=0.5,
        many=0.35,
        repeat=0.3,
        weights=_LATE,
    ),
    Stage(
        name="final",
        steps=3200,
        rate=1.3e-3,
        rate_end=1e-5,
        spans=(
            *((4, 4), (8, 8), (8, 8), (16, 16), (16, 16), (24, 24), (32, 32), (32, 32), (48, 48)),
            *((64, 40), (64, 64), (128, 48), (128, 128), (256, 48), (256, 80), (256, 256)),
            *((640, 56), (640, 56), (640, 80), (640, 160)),
        ),
        events=(1, 6),
        tokens=5500,
        window=0.4,
        far=0.3,
        drop=0.5,
        many=0.4,
        most=64,
        repeat=0.3,
        weights=_LATE | {"which_first": 1.8, "which_last": 1.8},
    ),
)
"""The stages of a full run."""
