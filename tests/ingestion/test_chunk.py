"""Several steps in one forward: each attends to the memory and the steps before it."""

from pathlib import Path

import pytest
import torch

from protokv.core.backbone import Backbone
from protokv.core.step import StepKV
from protokv.ingestion import Commit, Every, IngestProgress, ingest_events
from protokv.memories import MEMORIES, MemoryConfig
from protokv.stream.session import Session
from tests.conftest import random_frames, watched
from tests.mock_backbone import MockBackbone
from tests.prepared import Prepared
from tests.state.test_checkpoint import CONFIGS as SAVED
from tests.tolerance import check_logits

SOURCE = Prepared(1, 21)  # eleven steps, the last one short
QUESTION = "what is the first star ?"


@pytest.mark.parametrize(
    ("name", "positions"),
    [*((name, "stream") for name in MEMORIES), ("durable", "compact"), ("rekv", "compact")],
)
def test_while_nothing_was_evicted_a_chunk_is_its_steps_one_by_one(
    name: str, positions: str, tiny: Backbone
) -> None:
    config = MemoryConfig.of(name, budget=400, positions=positions).for_step(400)
    single = watched(tiny, config, range(4))
    chunked = Session.start(tiny, config)
    chunked.watch_prepared([tiny.prepare(random_frames(n)) for n in range(3)], [0.0, 1.0, 2.0])
    chunked.watch(random_frames(3))
    assert single.clock == chunked.clock
    expected = single.prefill(QUESTION)
    check_logits(single, chunked.prefill(QUESTION), expected)


def test_a_step_attends_to_the_memory_and_the_chunk_so_far(
    tiny: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle forwards the steps in turn, with one local cache, over the context before the
    chunk.
    """
    session = watched(tiny, SAVED["durable"], range(9))
    prepared = [tiny.prepare(random_frames(seed)) for seed in range(20, 23)]
    expected = []
    with torch.inference_mode():
        tokens = [tiny.embed_steps([one], [0.0])[0] for one in prepared]
        cache = session.cache.fork(session.memory.context())
        next_position = session.clock.next_position
        for index, one in enumerate(tokens, start=9):
            stands = tiny.step_positions(
                one,
                origin=len(tiny.prefix_ids),
                start=next_position,
                index=index,
                time_s=float(index),
            )
            next_position = max(next_position, max(stands.highest) + 1)
            before = cache.length
            tiny.forward(one.embeddings, stands.positions, cache, steps=[one])
            keys, values = (part[:, :, before:] for part in cache.read_all())
            expected.append((keys, values, stands.positions, index))
    taken: list[StepKV] = []
    append = session.memory.append
    monkeypatch.setattr(session.memory, "append", lambda step: taken.append(step) or append(step))
    session.watch_prepared(prepared, [9.0, 10.0, 11.0])
    assert len(taken) == 3
    for step, (keys, values, places, index) in zip(taken, expected, strict=True):
        check_logits(session, step.keys, keys)
        check_logits(session, step.values, values)
        assert torch.equal(step.positions, places)
        assert step.step == index


def test_progress_and_commits_come_behind_whole_chunks(path: Path) -> None:
    # A file that names none has chunks of four.
    events = ingest_events(
        SOURCE,
        path,
        SAVED["durable"],
        backbone=MockBackbone(),
        chunk=None,
        every=Every(n_steps=1),
    )
    told = list(events)
    assert [event.steps for event in told if isinstance(event, IngestProgress)] == [4, 8, 11]
    assert [event.steps for event in told if isinstance(event, Commit)] == [4, 8, 11, 11]
