"""Counters of a bank stay exact however long the stream is."""

from typing import Any

import pytest
import torch

from protokv.memories import MEMORIES, ContinuityConfig, DurableConfig, MemoryConfig
from protokv.memories.paper.memory import PaperPrototypeMemory
from tests.core.streams import World, shape_of, slots_of

LONG = 10**8
CASES: dict[str, MemoryConfig] = {
    "durable": DurableConfig(budget=4, split=(0, 1), center_bits=32),
    "durable, quantized": DurableConfig(budget=4, split=(0, 1)),
    "continuity": ContinuityConfig(budget=4, split=(0, 1), merge=False),
}


@pytest.mark.parametrize("config", CASES.values(), ids=CASES.keys())
def test_a_token_more_is_a_token_more_after_many(config: MemoryConfig) -> None:
    world = World(shape_of(layers=1, heads=2, size=4, sink=0), 0, things=1, noise=0.01)
    memory: Any = MEMORIES[config.name].memory(config, world.shape, world.rotary)
    memory.start(*world.sink())
    memory.append(world.step(0, 8))
    bank = memory._bank
    # As if the stream had brought 10**8 tokens of every prototype, up to a position beyond 2**24.
    bank.mass += LONG
    bank.absorbed += 4 * LONG
    bank.position += 2**30
    world.time = 2**30 + 8
    for index in range(1, 9):
        memory.append(world.step(index, 3))
        # Nothing is gone, and nothing came twice: every token is in the mass of one prototype, to
        # the last one.
        assert (bank.mass.sum(-1) == 4 * LONG + 8 + 3 * index).all()
        assert float(bank.position.max()) == world.time - 1
    assert torch.isfinite(slots_of(memory).bias).all()


def test_a_mean_position_of_a_billion_tokens_still_moves() -> None:
    world = World(shape_of(layers=1, heads=1, size=4, sink=0), 0, things=1, noise=0.01)
    memory = PaperPrototypeMemory(
        ContinuityConfig(budget=1, split=(0, 1), anchor="average"), world.shape, world.rotary
    )
    memory.start(*world.sink())
    memory.append(world.step(0, 1))
    bank = memory._bank
    bank.mass.fill_(LONG)
    bank.position.fill_(2.0**30)
    world.time = 2**31
    memory.append(world.step(1, 1))
    assert float(bank.position) - 2**30 == pytest.approx(2**30 / (LONG + 1), rel=1e-6)
