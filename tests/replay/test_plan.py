"""A plan: what it costs, that it can be stopped, and what it refuses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from protokv.backbones.base import Backbone
from protokv.config import DurableConfig, MemoryConfig
from protokv.core.session import Session
from protokv.core.step import StepTokens
from protokv.errors import ConfigError
from protokv.replay.plan import make_plan, run
from protokv.replay.rows import Row, RowFile
from protokv.replay.runner import Setup, Variant, Watched
from protokv.replay.worlds import WorldStream

VARIANTS = [
    Variant("durable", DurableConfig(budget=24)),
    Variant("window", MemoryConfig.of("sliding-window", budget=24)),
]
DELAYS = [0.0, 10.0, 20.0]


def test_stopping_keeps_what_is_done_and_going_on_gives_the_rest(
    tiny: Backbone, stream: WorldStream, tmp_path: object
) -> None:
    plan = make_plan([stream], VARIANTS, DELAYS, Setup.of(tiny))
    whole, path = RowFile(f"{tmp_path}/whole"), f"{tmp_path}/parts"
    list(run(plan, tiny, whole))
    steps = 0

    def tired() -> bool:
        return steps >= 20

    for event in run(plan, tiny, RowFile(path), should_stop=tired):
        steps += isinstance(event, Watched)
    assert 0 < len(RowFile(path).rows) < len(whole.rows)
    list(run(plan, tiny, RowFile(path)))
    parts = RowFile(path).rows
    assert parts.keys() == whole.rows.keys()
    assert all(parts[key].prediction == row.prediction for key, row in whole.rows.items())


def test_the_cost_that_is_told_is_what_is_done(
    tiny: Backbone, stream: WorldStream, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of the last frames no more is encoded than a question depends on.
    last = Variant("last", MemoryConfig.of("last-frames", budget=24, last_steps=2))
    plan = make_plan([stream], [*VARIANTS, last], DELAYS, Setup.of(tiny))
    cost, taken, take = plan.cost(), Counter[str](), Session.take

    def counted(session: Session, steps: Sequence[StepTokens], starts_s: Sequence[float]) -> None:
        taken[session.config.name] += len(steps)
        take(session, steps, starts_s)

    monkeypatch.setattr(Session, "take", counted)
    events = list(run(plan, tiny, RowFile(f"{tmp_path}/r")))
    assert cost["answers"] == sum(isinstance(event, Row) for event in events)
    assert cost["embedded"] == sum(isinstance(event, Watched) for event in events)
    assert cost["steps"] == taken.total()
    assert taken["last-frames"] < taken["durable"] == taken["sliding-window"] == cost["embedded"]
    assert plan.cost({event.key for event in events if isinstance(event, Row)})["answers"] == 0


def test_the_same_memory_twice_is_refused(tiny: Backbone, stream: WorldStream) -> None:
    with pytest.raises(ConfigError, match="durable at 24 is there twice"):
        make_plan([stream], [*VARIANTS, VARIANTS[0]], DELAYS, Setup.of(tiny))
