"""The pass: one stream, many memories, the answers of sessions of their own."""

from __future__ import annotations

import pytest

from protokv.backbones.base import Backbone
from protokv.config import DurableConfig, MemoryConfig
from protokv.errors import ConfigError
from protokv.generate import Decoding
from protokv.replay.plan import make_plan, run
from protokv.replay.rows import Row, RowFile
from protokv.replay.runner import Variant, Watched, replay
from protokv.replay.schedule import schedule
from protokv.replay.streams import Pressure, WorldStream, make_worlds
from protokv.replay.studies import STUDIES, find_study, name_memories, name_memory
from protokv.session import Session

VARIANTS = [
    Variant("durable", DurableConfig(budget=24)),
    Variant("window", MemoryConfig.of("sliding-window", budget=24)),
]
DELAYS = [0.0, 10.0, 20.0]


@pytest.fixture(scope="module")
def stream() -> WorldStream:
    return WorldStream(11, 40, Pressure(12.0), per_type=1)


def answers(backbone: Backbone, stream: WorldStream, **options: object) -> list[Row]:
    plan = schedule(stream.questions, DELAYS, stream.length_s)
    events = replay(backbone, stream, plan, VARIANTS, decoding=Decoding(max_new_tokens=3), **options)  # type: ignore[arg-type]
    return [event for event in events if isinstance(event, Row)]


def test_rows_are_the_answers_of_a_session_that_watched_alone_until_then(tiny: Backbone, stream: WorldStream) -> None:
    rows = answers(tiny, stream)
    plan = schedule(stream.questions, DELAYS, stream.length_s)
    assert len(rows) == len(plan.asks) * len(VARIANTS)
    for variant in VARIANTS:
        session = Session.start(tiny, variant.config)
        left = [row for row in rows if row.memory == variant.label]
        for step in stream.steps(tiny.default_fps, tiny.frames_per_step):
            session.watch(step.images, step.time_s)
            while left and left[0].asked_s == session.clock.stream_time_s:
                row = left.pop(0)
                assert row.prediction == session.ask(row.question, Decoding(max_new_tokens=3)).text
                assert 0 <= row.asked_s - (row.reference_s + row.delay_s) < session.clock.step_seconds
                assert row.tokens_seen == session.clock.tokens_seen
        assert not left


def test_finished_rows_are_not_asked_again_and_a_finished_memory_is_not_run(
    tiny: Backbone, stream: WorldStream
) -> None:
    rows = answers(tiny, stream)
    done = {row.key for row in rows if row.memory == "durable" or row.delay_s == 0.0}
    left = answers(tiny, stream, done=done)
    assert {row.key for row in left} == {row.key for row in rows} - done
    assert {row.memory for row in left} == {"window"}
    assert answers(tiny, stream, done={row.key for row in rows}) == []


def test_stopping_keeps_what_is_done_and_going_on_gives_the_rest(
    tiny: Backbone, stream: WorldStream, tmp_path: object
) -> None:
    plan = make_plan([stream], VARIANTS, DELAYS)
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


def test_a_pass_ends_with_its_last_question(tiny: Backbone, stream: WorldStream) -> None:
    plan = schedule(stream.questions, [0.0], stream.length_s)
    seen = [e for e in replay(tiny, stream, plan, VARIANTS) if isinstance(e, Watched)]
    assert seen[-1].stream_time_s <= 17.0


def test_the_cost_that_is_told_is_what_is_done(tiny: Backbone, stream: WorldStream, tmp_path: object) -> None:
    plan = make_plan([stream], VARIANTS, DELAYS)
    cost = plan.cost(tiny.default_fps, tiny.frames_per_step)
    events = list(run(plan, tiny, RowFile(f"{tmp_path}/r")))
    assert cost["answers"] == sum(isinstance(event, Row) for event in events)
    assert cost["steps"] == len(VARIANTS) * sum(isinstance(event, Watched) for event in events)
    assert plan.cost(2.0, 2, {event.key for event in events if isinstance(event, Row)})["answers"] == 0


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_has_different_memories_that_fit(name: str) -> None:
    found = find_study(name).variants([144, 512])
    assert len({(v.label, v.config.budget) for v in found}) == len(found) > 1
    assert len({(v.config.budget, str(v.config)) for v in found}) >= len(found) - 2
    assert sum(v.label == "full" for v in found) <= 1


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_fits_its_own_streams(name: str) -> None:
    study = find_study(name)
    assert study.variants()
    (stream,) = make_worlds(study.seeds[:1], study.length_s, study.pressure, per_type=study.per_type)
    assert schedule(stream.questions, study.delays_s, stream.length_s).questions > 4


def test_the_coefficient_sweep_halves_and_doubles_each_constant() -> None:
    found = {variant.label: variant.config for variant in find_study("coefficients").variants([512])}
    assert len(found) == 11
    assert found["T_idle x2"].with_fields({"idle_steps": 120}) == found["paper"]
    assert found["alpha, beta x0.5"].to_dict()["key_rate"] == 0.025


def test_memories_are_named_by_their_one_name() -> None:
    assert name_memory("durable", 64).config == DurableConfig(budget=64)
    assert name_memory("full", 64).config.name == "full"
    assert [(v.label, v.config.budget) for v in name_memories(["paper", "full"], [64, 128])] == [
        ("paper", 64), ("full", 64), ("paper", 128), ("full", 128),
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="elephant"):
        name_memory("elephant", 64)


def test_the_same_memory_twice_is_refused(stream: WorldStream) -> None:
    with pytest.raises(ConfigError, match="durable at 24 is there twice"):
        make_plan([stream], [*VARIANTS, VARIANTS[0]], DELAYS)
