"""Batched streams: each is what it would be alone, under every memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from protokv.backbones import EMBEDDED, load_backbone
from protokv.core.backbone import Backbone
from protokv.core.session import Session
from protokv.core.step import StepTokens
from protokv.memories import MemoryConfig
from protokv.replay.batched import SHARED, BatchedStreams
from protokv.replay.memories import Variant
from protokv.replay.plan import make_plan, run
from protokv.replay.rows import RowFile
from protokv.replay.runner import Setup
from protokv.replay.worlds import Worlds
from tests.conftest import random_frames
from tests.tolerance import near_logits

STREAMS, STEPS = 3, 6


@pytest.fixture(scope="module")
def embedded() -> Backbone:
    return load_backbone(EMBEDDED, device="cpu")


@pytest.fixture(scope="module")
def step_of(embedded: Backbone) -> Callable[[int], StepTokens]:
    """Return a function from a seed to the embedded step of its frames."""
    return cache(lambda seed: embedded.embed_step(random_frames(seed)))


@pytest.mark.parametrize(("budget", "positions"), [(7, "stream"), (33, "compact")])
@pytest.mark.parametrize("memory", [*sorted(SHARED), "rekv"])
def test_a_stream_among_others_is_the_stream_alone(
    embedded: Backbone, step_of: Callable[[int], StepTokens], memory: str, budget: int, positions: str
) -> None:
    # Idle prototypes are gone soon, so that slots are opened again with tokens that are drawn.
    more: dict[str, Any] = {"idle_steps": 3} if memory == "paper" else {}
    more |= {"pseudo_tokens": 2, "warmup_residuals": 32} if memory == "paper" else {}
    config = MemoryConfig.of(memory, budget=budget, positions=positions, **more)
    together = BatchedStreams(embedded, config, STREAMS)
    alone = [Session.start(embedded, config) for _ in range(STREAMS)]
    for number in range(STEPS):
        start_s = float(number)
        # Now and then a stream repeats an earlier step.
        seen = [number if (number + stream) % 3 else stream for stream in range(STREAMS)]
        steps = [step_of(100 * stream + seen[stream]) for stream in range(STREAMS)]
        together.take(steps, start_s)
        for session, step in zip(alone, steps, strict=True):
            session.take([step], [start_s])
    for number, (one, other) in enumerate(zip(together.sessions, alone, strict=True)):
        assert one.clock == other.clock
        expected = other.prefill("What was it?")
        torch.testing.assert_close(one.prefill("What was it?"), expected, **near_logits(other, expected))
        assert together.bytes_held(number) == other.memory.bytes_held
    if memory in SHARED:
        with pytest.raises(RuntimeError, match="among several"):
            together.sessions[0].tensors()


def test_rows_of_streams_batched_are_those_of_each_alone(embedded: Backbone, tmp_path: object) -> None:
    variants = [Variant(name, MemoryConfig.of(name, budget=24)) for name in ("durable", "full")]
    worlds = Worlds(first_seed=0, count=3, length_s=20, distractor_rate=12.0, before=0, per_type=1).open()
    plan = make_plan(worlds, variants, [0.0, 2.0], Setup.of(embedded))
    found = []
    for batched in (1, 2):
        rows = RowFile(f"{tmp_path}/{batched}")
        list(run(plan, embedded, rows, batched=batched))
        found.append(rows.rows)
    assert found[0].keys() == found[1].keys()
    for key, row in found[0].items():
        other = found[1][key]
        assert (row.prediction, row.asked_s, row.tokens_seen) == (other.prediction, other.asked_s, other.tokens_seen)
        assert (row.state_bytes, row.context_tokens) == (other.state_bytes, other.context_tokens)
        assert np.isfinite(other.step_ms)
    assert {row.batched for row in found[1].values()} == {1, 2}
