"""A steady step of `durable` is the same operations on the same memory, so that a graph of one step serves all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from protokv.core import arrays
from protokv.core.build import build_memory, restore_memory
from protokv.core.step import StepKV
from protokv.memories import MemoryConfig
from protokv.memories.durable import repeats, rule
from protokv.memories.durable.memory import Durable
from tests.core.streams import World, copy_of, same, shape_of, shown_to
from tests.counting import Recording

T = 6
# Neither window is a whole number of steps, so that every wrap cuts another one.
CONFIGS = {
    "all are points": MemoryConfig.of("durable", budget=75),
    "some are candidates": MemoryConfig.of("durable", budget=203),
    "32 bits": MemoryConfig.of("durable", budget=203, center_bits=32),
}


class Stream:
    """A memory whose steps stand in buffers of their own; `step` is all that a graph would hold."""

    def __init__(self, memory: Durable, like: StepKV) -> None:
        self.memory = memory
        self.buffers = [like.keys.clone(), like.values.clone(), like.positions.clone(), like.coordinates.clone()]

    def tell(self, step: StepKV) -> None:
        self.memory.tell(step.step, T)
        for held, new in zip(self.buffers, (step.keys, step.values, step.positions, step.coordinates), strict=True):
            held.copy_(new)

    def step(self) -> list[Tensor]:
        keys, values, positions, coordinates = self.buffers
        self.memory.update(self.memory._sanitizer.admit(StepKV(keys, values, positions, coordinates, step=-1)))
        return self.read()

    def read(self) -> list[Tensor]:
        context, query = self.memory.context(), self.buffers[0][0]
        return [part for layer in range(len(self.buffers[0])) for part in shown_to(context, layer, query)]

    def record(self, step: StepKV) -> tuple[Recording, list[Tensor]]:
        self.tell(step)
        with Recording() as recording:
            shown = self.step()
        return recording, shown


@pytest.mark.parametrize("deep", [False, True], ids=["shallow", "deep"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("steps", [24, pytest.param(200, marks=pytest.mark.slow)])
def test_a_recorded_step_is_replayed_to_equal_bytes(
    steps: int, config: MemoryConfig, deep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What only a CPU does: it reads in numpy, and works through a bank in parts.
    monkeypatch.setattr(arrays, "has_data_here", lambda numbers: False)
    monkeypatch.setattr(rule, "_AT_ONCE", {})
    monkeypatch.setattr(repeats, "DEEP", 1 if deep else 99)
    world = World(shape_of(layers=2, heads=2, components=3), 1, things=300, noise=0.1, still=0.5)
    sink, number = world.sink(), 0

    def following() -> StepKV:
        nonlocal number
        number += 1
        return world.step(number, T)

    def stream(state: dict[str, Tensor] | None) -> Stream:
        if state is None:
            memory = build_memory(config, world.shape, world.rotary)
            memory.start(*sink)
        else:
            memory = restore_memory(config, world.shape, world.rotary, state)
        assert isinstance(memory, Durable)
        return Stream(memory, first)

    def both(act: Callable[[Stream], object]) -> None:
        act(eager)
        act(replayed)

    first = following()
    eager, replayed = stream(None), stream(None)
    for step in [first, *(following() for _ in range(config.budget // T + 4))]:
        both(lambda one, step=step: one.tell(step) or one.step())  # type: ignore[misc]
    operations, states = None, set()
    for part in range(2):
        step = following()
        recording, shown = replayed.record(step)
        addresses = None
        for index in range(steps // 2):
            again, expected = eager.record(step)
            # The same operations, shapes and scalars, before the resume and after it, in memory that does not move.
            operations, addresses = operations or again.operations, addresses or again.addresses
            assert again.operations == operations
            assert again.addresses == addresses
            if index:
                replayed.tell(step)
                recording.replay()
            assert same(copy_of(replayed.memory), copy_of(eager.memory))
            assert all(map(torch.equal, shown, expected))
            if index % 7 == 0:
                assert all(map(torch.equal, replayed.read(), expected))
            states.add(eager.memory._near._start)
            step = following()
        if part == 0:
            eager, replayed = (stream(copy_of(one.memory)) for one in (eager, replayed))
            both(lambda one, step=step: one.tell(step) or one.step())  # type: ignore[misc]
    # The ring began at as many places.
    assert len(states) > 10
