"""Memories of exact tokens in 8 bits are those of tokens rounded one number at a time, in fewer bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from protokv.core.build import build_memory
from protokv.core.memory import Memory
from protokv.core.tensors import MemoryShape
from protokv.memories import MemoryConfig
from tests.core.streams import World, copy_of, feed, shape_of
from tests.oracles.quantized import round_center

# All of them drop and move tokens. The mean tokens of HERMES are rounded again.
MEMORIES = {
    "sliding-window": {},
    "last-frames": {"last_steps": 3},
    "dycoke": {},
    "infinipot-v": {},
    "hermes": {"deep_share": 0.0},
}


def rounded(vectors: Tensor) -> Tensor:
    """`[L, H, T, D]`, each token rounded by itself."""
    rows = [round_center(row, row, 1)[0] for row in vectors.float().flatten(0, 2)]
    return torch.stack(rows).view_as(vectors).to(vectors.dtype)


def built(name: str, shape: MemoryShape, seed: int, **settings: object) -> tuple[Memory, World]:
    world = World(shape, seed)
    return build_memory(MemoryConfig.of(name, **settings), shape, world.rotary), world


@given(
    name=st.sampled_from([*MEMORIES]),
    budget=st.integers(2, 23),
    lengths=st.lists(st.integers(1, 9), min_size=2, max_size=7),
    size=st.sampled_from([8, 12, 34, 64]),
    components=st.sampled_from([1, 3]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**16),
)
def test_a_memory_in_8_bits_is_the_memory_of_rounded_tokens(
    name: str, budget: int, lengths: list[int], size: int, components: int, dtype: torch.dtype, seed: int
) -> None:
    shape = shape_of(heads=2, size=size, components=components, dtype=dtype)
    plain, world = built(name, shape, seed, budget=budget, **MEMORIES[name])
    packed, _ = built(name, shape, seed, budget=budget, **MEMORIES[name], kv_bits=8)
    sink = world.sink()
    for memory in (plain, packed):
        memory.start(*sink)
    for index, tokens in enumerate(lengths):
        step = world.step(index, tokens)
        packed.append(step)
        plain.append(replace(step, keys=rounded(step.keys), values=rounded(step.values)))
        for one, other in ((packed.context(), plain.context()), (packed.recall(), plain.recall())):
            for layer in range(shape.layers):
                (found,), (expected,) = (some.at(layer, torch.ones(4, 1, size)) for some in (one, other))
                assert found.keys.dtype == dtype
                used = expected.bias > -1e29
                assert torch.equal(found.bias, expected.bias)
                assert torch.equal(found.keys[used], expected.keys[used])
                assert torch.equal(found.values[used], expected.values[used])
                places, those = one.positions_at(layer), other.positions_at(layer)
                assert places is not None
                assert those is not None
                assert torch.equal(places[used], those[used])


@pytest.mark.parametrize("name", MEMORIES)
def test_a_token_takes_a_byte_a_number_and_one_for_every_32(name: str) -> None:
    shape, held = shape_of(heads=3, size=128), {}
    for bits in ("model", 8):
        small, large = (built(name, shape, 0, budget=budget, kv_bits=bits)[0] for budget in (30, 50))
        held[bits] = (large.bytes_held - small.bytes_held) / 20
    numbers = 2 * shape.layers * shape.kv_heads * 128
    assert held["model"] - held[8] == numbers * 4 - numbers * (1 + 1 / 32)


def test_mean_tokens_and_a_loaded_state_are_what_was_held() -> None:
    memory, world = built("hermes", shape_of(size=16), 0, budget=20, deep_share=1.0, shallow_share=0.0, kv_bits=8)
    feed(memory, world, [7] * 5)
    state = copy_of(memory)
    again, _ = built("hermes", shape_of(size=16), 0, budget=20, deep_share=1.0, shallow_share=0.0, kv_bits=8)
    again.load(state)
    assert torch.equal(again.context().keys, memory.context().keys)
