"""The curriculum of one shape over time, for weights that read order: six stages, pure data.

One layer learns where events begin, and a second one learns to gather the events of a shape evenly.
Both learn alone in a frozen network, and change no token that questions about time do not need.
Then the later layers learn to answer. The two layers learn alone once more, with more detail about
beginnings, and the later layers follow. The last stage asks more of the types that suffer most from
sharing a word with questions about time. The layers in front and the words stay frozen: even shares
do not survive the learning rate that answers need.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from samples.training.order_curriculum import LATE, ORDER_LINKS, WEIGHTS, OrderStage, Scene

TIME_STEPS: Final = 8740
"""Steps of a full run, all stages together."""

_LAYERS: Final = "model.language_model.layers."
_SCENE: Final = Scene(events=(3, 6), others=(0, 36), span=(30, 600))
_ASKED: Final = {
    "where_first": 1.0,
    "where_last": 1.0,
    "before": 0.4,
    "after": 0.4,
    "which_first": 0.4,
    "which_last": 0.4,
    "tenth": 0.4,
    "third": 0.3,
    "whether": 0.2,
    "colour": 0.4,
    "where": 0.4,
    "at": 0.2,
    "shape": 0.2,
    "first": 0.2,
    "count": 0.2,
}
"""Weights of the types while the two layers learn alone: questions about time, and all that must
not change.
"""

ONSET: Final = OrderStage(
    name="onset",
    steps=600,
    rate=3e-3,
    rate_end=6e-5,
    warm_up=30,
    scene=_SCENE,
    easy=0.7,
    questions=4,
    weights={**_ASKED, "times": 1.0},
    links={"onset": 5.0, "code": 5.0, "follows": 1.0},
    trains=(f"{_LAYERS}1.", "links.onset.", "links.code.", "links.follows."),
    window=0.15,
    far=0.15,
    recurring=0.75,
    crossing=0.1,
    quiet={1: (0.01, 2.0)},
)

GATHER: Final = replace(
    ONSET,
    name="gather",
    steps=0,
    rate=2e-3,
    rate_end=4e-5,
    easy=0.5,
    questions=8,
    weights={**_ASKED, "times": 3.0},
    links={
        "traces": 1.0,
        "follows": 0.5,
        "code": 3.0,
        "look_events": 1.0,
        "looks": 1.0,
        "times": 2.0,
        "until": 1.0,
    },
    trains=(
        *(f"{_LAYERS}{i}." for i in (1, 2)),
        *(f"links.{name}." for name in ("code", "follows", "looks", "times", "until")),
    ),
    window=0.1,
    far=0.1,
    drop=0.2,
    recurring=0.8,
    quiet={1: (0.001, 0.0), 2: (0.0, 0.0)},
)

TALLY: Final = OrderStage(
    name="tally",
    steps=0,
    rate=5e-4,
    rate_end=5e-6,
    scene=_SCENE,
    easy=0.7,
    weights={
        **WEIGHTS,
        **LATE,
        "tenth": 3.0,
        "count": 1.0,
        "times": 5.0,
        "where_first": 3.0,
        "where_last": 3.0,
    },
    weights_end={"times": 4.0, "where_first": 1.5, "where_last": 2.0},
    links={name: weight / 3 for name, weight in ORDER_LINKS.items()}
    | {"opening": 2.0, "closing": 2.0, "look_latest": 0.2},
    trains=(*(f"{_LAYERS}{i}." for i in range(3, 8)), "model.language_model.norm.", "links."),
    window=0.1,
    far=0.2,
    drop=0.35,
    recurring=0.65,
    crossing=0.35,
    repeated=0.2,
)

SETTLE: Final = replace(
    GATHER,
    name="settle",
    rate=1.5e-3,
    rate_end=1e-5,
    easy=0.2,
    weights={kind: weight / 2 for kind, weight in _ASKED.items()}
    | {"times": 3.0, "where_first": 0.7, "where_last": 0.7},
    links={**GATHER.links, "marks": 3.0, "look_events": 2.0, "looks": 2.0},
    trains=(*GATHER.trains, "links.marks."),
)

ANSWER: Final = replace(
    TALLY,
    name="answer",
    rate=2e-4,
    rate_end=2e-6,
    easy=0.3,
    weights={**TALLY.weights, "tenth": 6.0},
    weights_end={"times": 5.0, "where_first": 3.0, "where_last": 3.0},
    links={**TALLY.links, "part": 3.0, "clock": 2.0},
)

POLISH: Final = replace(
    ANSWER,
    name="polish",
    steps=240,
    rate=1e-4,
    rate_end=1e-6,
    easy=0.0,
    weights={**ANSWER.weights, "where": 4.0},
    weights_end={"where": 4.0, "times": 4.0},
)


def make_time_curriculum(steps: int = TIME_STEPS) -> tuple[OrderStage, ...]:
    """Return the stages of a run of `steps` steps; the first and the last have a fixed length."""
    rest = steps - ONSET.steps - POLISH.steps
    shares = ((GATHER, 24), (TALLY, 24), (SETTLE, 16))
    middle = [replace(stage, steps=rest * share // 79) for stage, share in shares]
    return (
        ONSET,
        *middle,
        replace(ANSWER, steps=rest - sum(stage.steps for stage in middle)),
        POLISH,
    )
