"""A score sees positions, steps, queries and attention: SnapKV and H2O are rules of a
few lines.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import protokv
from protokv.core.backbone import Backbone
from protokv.core.build import build_memory
from protokv.core.step import StepKV
from protokv.errors import ConfigError
from protokv.memories import HeldTokens, MemoryConfig
from protokv.stream.session import Session
from protokv.testing import MemoryTests
from protokv.testing.memories import build
from protokv.texts import Keywords
from tests.conftest import random_frames, watched
from tests.core.streams import World, feed, shape_of
from tests.memories.rules import H2O, H2OConfig, LongestConfig, SnapKVConfig


class TestRules(MemoryTests):
    configs = (SnapKVConfig(budget=29), H2OConfig(budget=29), LongestConfig(budget=29))


def attended_to(memory: H2O, step: StepKV, sink: Tensor) -> Tensor:
    """What a step gives to held tokens and to its own, one query at a time, `[L, H, n + T]`."""
    L, H, T, D = step.keys.shape
    assert step.queries is not None
    held = memory.kept.keys[:, :, : len(memory.kept)]
    keys = torch.cat((sink, held, step.keys), 2)
    P0 = sink.shape[2]
    given_to = torch.zeros(L, H, keys.shape[2] - P0)
    for layer in range(L):
        for head in range(step.queries.shape[1]):
            kv_head = head * H // step.queries.shape[1]
            for t in range(T):
                seen = keys.shape[2] - T + t + 1
                query = step.queries[layer, head, t]
                weights = (keys[layer, kv_head, :seen] @ query / D**0.5).softmax(0)
                given_to[layer, kv_head, : seen - P0] += weights[P0:]
    return given_to


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.integers(0, 99))
def test_attention_is_summed_as_one_query_at_a_time_would(lengths: list[int], seed: int) -> None:
    shape = shape_of(heads=2)
    world = World(shape, seed, query_heads=4)
    memory = H2O(H2OConfig(budget=60), shape, world.rotary)
    keys, values = world.sink()
    memory.start(keys, values)
    expected = torch.zeros(2, 2, 0)
    for index, tokens in enumerate(lengths):
        step = world.step(index, tokens)
        more = attended_to(memory, step, keys)
        expected = torch.nn.functional.pad(expected, (0, tokens)) + more
        memory.append(step)
        found = memory.kept.attention[:, :, : len(memory.kept)]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_heavy_hitter_and_what_the_newest_step_looks_at_stay() -> None:
    shape = shape_of(layers=1, heads=1, size=16)
    # There is room for the newest step of four and one token more.
    room: Keywords = {
        "budget": 9,
        "kept_share": 0.6,
    }
    for config in (H2OConfig(**room), SnapKVConfig(**room, pooling=1)):
        memory, world = build(config, shape, 3)
        steps = feed(memory, world, [4])
        wanted = steps[0].keys[:, :, 2:3]
        for index in range(1, 9):
            step = world.step(index, 4)
            # All queries look where the third token of the stream is.
            memory.append(replace(step, queries=30 * wanted.expand(1, 2, 4, 16)))
        held = memory.tensors()
        assert int(held["kept.count"][0]) == 1
        assert torch.equal(held["kept.keys"][0, 0, :1], wanted[0, 0])


@pytest.mark.parametrize("positions", ["stream", "compact"])
@torch.inference_mode()
def test_a_session_brings_the_queries_of_each_step(
    positions: str, tiny: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = H2OConfig(budget=60).with_fields({"positions": positions})
    seen: list[HeldTokens] = []

    def score(self: H2O, held: HeldTokens) -> Tensor:
        seen.append(held)
        assert held.attention is not None
        return held.attention.clone()

    monkeypatch.setattr(H2O, "score", score)
    session = Session.start(tiny, config)
    for seed in range(12):
        images = random_frames(seed, tiny.frames_per_step)
        if seed == 11:
            tokens = session.embed(images, session.clock.stream_time_s)
            (step,) = session.position_steps([tokens], [session.clock.stream_time_s])
            placed = session.placement.place(session.memory.context(), session.clock.next_position)
            cache = session.cache.fork(placed)
            cache.queries = []
            where = session.placement.forward_positions(step.positions, placed)
            tiny.forward(tokens.embeddings, where, cache, steps=[tokens])
            expected = session.placement.stream_keys(torch.stack(cache.queries), placed)
            seen.clear()
        session.watch(images)
    assert len(seen) in (0, tiny.layers)
    memory = session.memory
    assert isinstance(memory, H2O)
    torch.testing.assert_close(memory._queries, expected)
    assert memory.kept.attention[:, :, : len(memory.kept)].min() > 0


def test_a_step_without_its_queries_and_a_cache_are_refused(tiny: Backbone) -> None:
    world = World(shape_of(), 0)
    memory = build_memory(H2OConfig(budget=20), world.shape, world.rotary)
    memory.start(*world.sink())
    with pytest.raises(RuntimeError, match="reads queries"):
        memory.append(world.step(0, 3))
    model: object = getattr(tiny, "_model", None)
    with pytest.raises(ConfigError, match="reads more than keys and values"):
        protokv.Cache(model, memory=H2OConfig(budget=20))
    config: MemoryConfig = LongestConfig(budget=20)
    assert watched(tiny, config, range(3)).clock.steps == 3
