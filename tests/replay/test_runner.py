"""A pass over one stream gives the answers of single sessions; it can be stopped."""

from collections import Counter
from dataclasses import replace

import pytest

from protokv.core.backbone import Backbone
from protokv.core.decoding import Decoding
from protokv.memories import MemoryConfig
from protokv.replay.memories import MemoryVariant
from protokv.replay.questions import plan_asks
from protokv.replay.rows import AnswerRow
from protokv.replay.runner import TrialSetup, replay_stream
from protokv.stream.session import Session
from samples.worlds.streams import Worlds, WorldStream

VARIANTS = [
    *(
        MemoryVariant(name, MemoryConfig.of(name, budget=24))
        for name in ("durable", "sliding-window")
    ),
    # It takes its steps only before a question.
    MemoryVariant(
        "last",
        MemoryConfig.of(
            "last-frames", budget=24, last_steps=2, recent_frames=4, positions="compact"
        ),
    ),
]
DELAYS = [0.0, 8.0]
SHORT = Decoding(max_new_tokens=3)


@pytest.fixture(scope="module")
def stream() -> WorldStream:
    return WorldStream(11, Worlds(length_s=30, distractor_rate=12.0, before=0, per_type=1))


def test_rows_are_the_answers_of_a_session_that_watched_alone_until_then(
    tiny: Backbone, stream: WorldStream
) -> None:
    setup = replace(TrialSetup.of(tiny), decoding=SHORT)
    asks = plan_asks(stream.questions, DELAYS, stream.length_s, Counter())
    events = replay_stream(stream, setup.plan_answers(stream, asks, VARIANTS), setup)
    rows = [event for event in events if isinstance(event, AnswerRow)]
    assert len(rows) == len(asks) * len(VARIANTS)
    for variant in VARIANTS:
        session = Session.start(tiny, variant.config)
        left = [row for row in rows if row.memory == variant.label]
        for step in stream.steps(tiny.default_fps, tiny.frames_per_step):
            session.watch(step.images, step.time_s)
            while left and left[0].asked_s == session.clock.stream_time_s:
                row = left.pop(0)
                assert row.prediction == session.ask(row.question, SHORT).text
                assert (
                    0 <= row.asked_s - (row.reference_s + row.delay_s) < session.clock.step_seconds
                )
                assert row.tokens_seen == session.clock.tokens_seen
        assert not left
