"""A pass over one stream gives the answers of single sessions; it can be stopped."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protokv.core.backbone import Backbone
from protokv.core.decoding import Decoding
from protokv.core.parts import PositionedStep
from protokv.errors import ConfigError
from protokv.memories import MemoryConfig
from protokv.replay.memories import MemoryVariant
from protokv.replay.plan import make_replay_plan, run_replay_plan
from protokv.replay.questions import plan_asks
from protokv.replay.rows import AnswerRow, AnswerRowFile
from protokv.replay.runner import ReplayProgress, TrialSetup, replay_stream
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
    plan = plan_asks(stream.questions, DELAYS, stream.length_s)
    events = replay_stream(tiny, stream, setup.plan_answers(stream, plan, VARIANTS), setup)
    rows = [event for event in events if isinstance(event, AnswerRow)]
    assert len(rows) == len(plan.asks) * len(VARIANTS)
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


def test_stopping_keeps_what_is_done_and_each_memory_takes_every_step(
    tiny: Backbone, stream: WorldStream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_replay_plan(
        [stream], VARIANTS, DELAYS, replace(TrialSetup.of(tiny), decoding=SHORT)
    )
    path = tmp_path / "parts"
    taken = Counter[str]()
    commit = Session.commit

    def counted(session: Session, steps: Sequence[PositionedStep], *forwarded: Any) -> None:
        taken[session.config.name] += len(steps)
        commit(session, steps, *forwarded)

    monkeypatch.setattr(Session, "commit", counted)
    events = list(run_replay_plan(plan, tiny, AnswerRowFile(tmp_path / "whole")))
    steps = sum(isinstance(event, ReplayProgress) for event in events)
    assert taken == dict.fromkeys(("last-frames", "durable", "sliding-window"), steps)
    whole = AnswerRowFile(tmp_path / "whole").rows
    stops = iter([False] * 20)
    assert (
        len(
            list(
                run_replay_plan(
                    plan, tiny, AnswerRowFile(path), should_stop=lambda: next(stops, True)
                )
            )
        )
        > 20
    )
    done = set(AnswerRowFile(path).rows)
    assert (plan.cost()["answers"], plan.cost(done)["answers"]) == (
        len(whole),
        len(whole) - len(done),
    )
    rest = {
        event.key
        for event in run_replay_plan(plan, tiny, AnswerRowFile(path))
        if isinstance(event, AnswerRow)
    }
    assert whole.keys() > done > set()
    assert rest == whole.keys() - done
    assert all(
        row.prediction == whole[key].prediction for key, row in AnswerRowFile(path).rows.items()
    )
    with pytest.raises(ConfigError, match="durable at 24 is there twice"):
        make_replay_plan([stream], [*VARIANTS, VARIANTS[0]], DELAYS, TrialSetup.of(tiny))
