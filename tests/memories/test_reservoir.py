"""`first-tokens` and `random`: the first tokens of a stream, and a uniform sample of them all."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from protokv.core.build import build_memory, restore_memory
from protokv.core.context import SlotContext
from protokv.core.memory import Memory
from protokv.errors import StateCorrupt
from protokv.memories import FirstTokensConfig, MemoryConfig, RandomTokensConfig
from tests.core.streams import World, copy_of, shape_of, slots_of

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=20)
BUDGETS = st.integers(1, 30)
SEEDS = st.integers(0, 99)


def held_times(memory: Memory) -> list[int]:
    """Return the times of the tokens that a question reads, in the order of the slots."""
    read = memory.recall()
    assert isinstance(read, SlotContext)
    live = read.bias[0, 0] > -torch.inf
    times: list[int] = read.positions()[0, 0, live, 0].tolist()
    return times[2:]


def watched(config: MemoryConfig, lengths: list[int], seed: int) -> tuple[Memory, Tensor]:
    """Return a memory that saw steps of these lengths, and the times of their tokens."""
    shape = shape_of(heads=2)
    world = World(shape, seed)
    memory = build_memory(config, shape, world.rotary)
    memory.start(*world.sink())
    steps = [world.step(index, tokens) for index, tokens in enumerate(lengths)]
    for step in steps:
        memory.append(step)
    times = torch.cat([step.positions[:, 0] for step in steps])
    keys = torch.cat([step.keys for step in steps], 2)
    read = slots_of(memory)
    live = read.bias[0, 0] > -torch.inf
    found = torch.tensor(held_times(memory), dtype=torch.int64)
    which = (times[None] == found[:, None]).int().argmax(1)
    assert torch.equal(read.keys[:, :, live][:, :, 2:], keys[:, :, which])
    return memory, times


@given(BUDGETS, LENGTHS, SEEDS)
def test_the_first_tokens_are_held_and_no_other(budget: int, lengths: list[int], seed: int) -> None:
    memory, times = watched(FirstTokensConfig(budget=budget), lengths, seed)
    assert held_times(memory) == times[:budget].tolist()


def sample_one_by_one(seed: int, lengths: list[int], size: int) -> list[int]:
    """Return the numbers of the tokens in a reservoir, by algorithm R, one token at a time."""
    held: list[int] = []
    seen = 0
    for tokens in lengths:
        raw = np.random.Philox(key=seed, counter=seen).random_raw(tokens)
        for number in raw:
            if len(held) < size:
                held.append(seen)
            else:
                place = int(number) % (seen + 1)
                if place < size:
                    held[place] = seen
            seen += 1
        # A memory holds its tokens in stream order after each step.
        held.sort()
    return held


@given(BUDGETS, LENGTHS, SEEDS)
def test_a_random_memory_is_the_reservoir_that_takes_one_token_at_a_time(
    budget: int, lengths: list[int], seed: int
) -> None:
    memory, times = watched(RandomTokensConfig(budget=budget, seed=seed), lengths, seed)
    assert held_times(memory) == times[sample_one_by_one(seed, lengths, budget)].tolist()


@pytest.mark.parametrize("seen", [-1, 3, 10])
def test_a_count_that_does_not_fit_the_held_tokens_is_refused_by_name(seen: int) -> None:
    config = RandomTokensConfig(budget=12)
    memory, _ = watched(config, [5, 2], 0)
    state = copy_of(memory) | {"reservoir.seen": torch.tensor([seen])}
    shape = shape_of(heads=2)
    with pytest.raises(StateCorrupt, match=r"reservoir\.seen"):
        restore_memory(config, shape, World(shape, 0).rotary, state, 2)
