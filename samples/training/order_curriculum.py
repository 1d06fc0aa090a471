"""The curriculum of order: the videos, questions, masks and links of each stage on the way from
content to order.

Pure data. All numbers of steps follow from `STEPS`. The order matters. The clock layer learns first
and alone. Then the model learns to compare two events among few, and later among many, with windows
and holes. At the end the rate falls, and answers weigh more than links, most of all those that are
learned slowest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from samples.training.curriculum import CURRICULUM

STEPS: Final = 6000
"""Steps of a full run, all stages together."""


@dataclass(frozen=True, slots=True)
class Scene:
    """The load of a video: events asked about, other events, and steps.

    Attributes:
        events, others, span: fewest and most of each.
        place: of the events among the others: start, middle or end; None draws one of these, or
            mixes all events.
    """

    events: tuple[int, int]
    others: tuple[int, int]
    span: tuple[int, int]
    place: str | None = None


EASY: Final = Scene(events=(2, 5), others=(0, 4), span=(8, 80))
HARD: Final = Scene(events=(3, 6), others=(0, 26), span=(30, 400))
HELD_OUT: Final = Scene(events=(4, 4), others=(24, 24), span=(240, 240))
"""The scene of the measurement at the end of a stage, made for each place."""


@dataclass(frozen=True, slots=True)
class OrderStage:
    """One stage. Shares are of batches, unless noted.

    Attributes:
        steps, rate, rate_end, warm_up, gate, gate_times: as in `curriculum.Stage`; a gate may name
            links.
        scene, easy: the scene of the videos, and the share of EASY ones at the start, which falls
            to zero.
        weights, weights_end: share of each question type at the start, and after 60 % of the stage.
        links: weight of each link's loss.
        trains: prefixes of the names of the parameters to train.
        tokens, questions: tokens of a batch, questions about a video.
        window, far, longest_window, drop: as in `curriculum.Stage`.
        shift, now: share of videos whose positions are shifted, and that end with an event.
        full_mass: share of videos whose shown unlit tokens stand for all unlit tokens. In the rest
            they stand for fewer, as the slots of a memory do, or for themselves.
        whole: share of batches of the stage WHOLE, which has no links.
        recurring, crossing: share of videos with recurring shapes, and share of these with a shape
            that crosses slowly.
        repeated: share of videos that show the events asked about twice.
        quiet: layer -> penalties on the mean square of its additions to visual tokens and to words.
            These layers learn alone: nothing is answered, and later layers are not run.
    """

    name: str
    steps: int
    rate: float
    weights: Mapping[str, float]
    links: Mapping[str, float]
    rate_end: float | None = None
    scene: Scene = HARD
    easy: float = 0.0
    weights_end: Mapping[str, float] = field(default_factory=dict)
    trains: tuple[str, ...] = ("",)
    tokens: int = 3500
    questions: int = 12
    window: float = 0.0
    far: float = 0.0
    longest_window: int = 16
    drop: float = 0.0
    shift: float = 0.15
    now: float = 0.25
    full_mass: float = 0.55
    whole: float = 0.12
    recurring: float = 0.0
    crossing: float = 0.0
    repeated: float = 0.0
    quiet: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    warm_up: int = 60
    gate: Mapping[str, float] = field(default_factory=dict)
    gate_times: int = 2


HELD_OUT_STAGE: Final = OrderStage(
    name="held out",
    steps=0,
    rate=0.0,
    weights={},
    links={},
    scene=HELD_OUT,
    shift=0.0,
    full_mass=1.0,
)
"""The stage of the measurement; the caller chooses the types to ask."""

WEIGHTS: Final = {
    "which_first": 2.0,
    "which_last": 2.0,
    "before": 1.5,
    "after": 1.5,
    "third": 0.8,
    "tenth": 1.5,
    "at": 2.0,
    "shape": 0.7,
    "colour": 0.4,
    "where": 0.5,
    "whether": 0.3,
    "first": 0.5,
    "last": 0.6,
    "count": 0.5,
    "now": 0.2,
    "anything_now": 0.1,
}

LATE: Final = {
    "shape": 0.9,
    "whether": 0.4,
    "last": 0.8,
    "count": 0.8,
    "now": 0.5,
    "anything_now": 0.2,
}
"""Weights of the types of content in the last stage, which repeats what the model knew before
order.
"""

WHOLE: Final = replace(
    CURRICULUM[-1],
    name="whole",
    spans=((1, 1), (2, 2), (4, 4), (8, 8), (16, 16), (24, 24), (32, 32), (64, 40), (128, 48)),
    tokens=4500,
    weights={**CURRICULUM[-1].weights, "before": 1.0, "after": 1.0},
)
"""Videos of whole steps, many of them short, so that the model does not forget counting."""

ORDER_LINKS: Final = {
    "clock": 3.0,
    "end": 1.0,
    "bag": 2.0,
    "look": 1.0,
    "when": 3.0,
    "bag_asked": 2.0,
    "later": 1.0,
    "other": 2.0,
    "part": 3.0,
}

CLOCK: Final = OrderStage(
    name="clock",
    steps=600,
    rate=3e-3,
    rate_end=6e-5,
    warm_up=50,
    tokens=2840,
    weights={},
    links={"clock": 1.0},
    trains=("model.language_model.layers.0.", "links.clock."),
    quiet={0: (0.01, 2.0)},
)
"""Train only the first layer and its reading. Words are 13 times fainter than visual tokens."""

COMPARE: Final = OrderStage(
    name="compare",
    steps=0,
    rate=1.2e-3,
    scene=EASY,
    weights=WEIGHTS,
    links=ORDER_LINKS,
    gate={"later": 0.95},
)

ORDER: Final = OrderStage(
    name="order",
    steps=0,
    rate=1.2e-3,
    easy=0.5,
    weights=WEIGHTS,
    links=ORDER_LINKS,
    window=0.12,
    far=0.18,
    drop=0.2,
)

FINISH: Final = OrderStage(
    name="finish",
    steps=0,
    rate=1.2e-3,
    rate_end=1.2e-5,
    weights=WEIGHTS,
    weights_end=LATE,
    links={name: weight / 3 for name, weight in ORDER_LINKS.items()},
    window=0.15,
    far=0.25,
    drop=0.35,
)


def make_curriculum(steps: int = STEPS) -> tuple[OrderStage, ...]:
    """Return the stages of a run of `steps` steps; the rate falls in the last 40 %."""
    compare = steps // 5
    rest = steps - CLOCK.steps - compare
    finish = round(0.4 * rest)
    return (
        CLOCK,
        replace(COMPARE, steps=compare),
        replace(ORDER, steps=rest - finish),
        replace(FINISH, steps=finish),
    )
