"""A stage of the curriculum that is over in a second, and the size of the models it trains."""

from __future__ import annotations

from dataclasses import replace

from samples.training.curriculum import Stage

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
