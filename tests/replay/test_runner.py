"""The pass: one stream, many memories, the answers of sessions of their own."""

from __future__ import annotations

from collections.abc import Collection

from protokv.backbones.base import Backbone
from protokv.config import DurableConfig, MemoryConfig
from protokv.core.decoding import Decoding
from protokv.core.session import Session
from protokv.replay.rows import Row
from protokv.replay.runner import Setup, Variant, Watched, replay
from protokv.replay.schedule import schedule
from protokv.replay.worlds import WorldStream

VARIANTS = [
    Variant("durable", DurableConfig(budget=24)),
    Variant("window", MemoryConfig.of("sliding-window", budget=24)),
    # Takes its steps only when there is a question.
    Variant("last", MemoryConfig.of("last-frames", budget=24, last_steps=2, recent_frames=4, positions="compact")),
]
DELAYS = [0.0, 10.0, 20.0]


def answers(backbone: Backbone, stream: WorldStream, done: Collection[str] = ()) -> list[Row]:
    setup = Setup.of(backbone, decoding=Decoding(max_new_tokens=3))
    asked = setup.asked(stream, schedule(stream.questions, DELAYS, stream.length_s), VARIANTS)
    events = replay(backbone, [(stream, [one for one in asked if one.key not in done])], setup)
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
    done = {row.key for row in rows if row.memory != "window" or row.delay_s == 0.0}
    left = answers(tiny, stream, done=done)
    assert {row.key for row in left} == {row.key for row in rows} - done
    assert {row.memory for row in left} == {"window"}
    assert answers(tiny, stream, done={row.key for row in rows}) == []


def test_a_pass_ends_with_its_last_question(tiny: Backbone, stream: WorldStream) -> None:
    setup = Setup.of(tiny)
    asked = setup.asked(stream, schedule(stream.questions, [0.0], stream.length_s), VARIANTS)
    seen = [e for e in replay(tiny, [(stream, asked)], setup) if isinstance(e, Watched)]
    assert seen[-1].stream_time_s <= 17.0
