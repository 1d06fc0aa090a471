"""A steady step of `durable` is the same operations on the same memory, so that a graph of one step
serves all.
"""

from dataclasses import replace
from itertools import count

import pytest
import torch
from torch import Tensor

from protokv.core.build import build_memory, restore_memory
from protokv.core.memory import Memory
from protokv.core.step import StepKV
from protokv.device import arrays
from protokv.device.runs import Plan
from protokv.memories import MemoryConfig
from protokv.memories.durable import repeats, rule
from protokv.memories.durable.memory import DurableMemory
from protokv.memories.durable.novelty import NOVELTY_NUMBERS
from tests.conftest import slow
from tests.core.streams import World, copy_of, same, shape_of, shown_to
from tests.counting import Recording

T = 6
BUFFERS = ("keys", "values", "positions", "coordinates")


class Stream:
    """A memory whose steps stand in buffers of their own; `run` is all that a graph would hold."""

    def __init__(self, memory: Memory, like: StepKV) -> None:
        assert isinstance(memory, DurableMemory)
        self.memory = memory
        self.step = replace(like, **{name: getattr(like, name).clone() for name in BUFFERS})
        self.numbers = torch.zeros(2 + NOVELTY_NUMBERS, dtype=torch.float64)
        self.plan = Plan()

    def tell(self, step: StepKV) -> None:
        self.plan = self.memory.plan(step)
        self.numbers[: len(self.plan.numbers)] = torch.tensor(
            self.plan.numbers, dtype=torch.float64
        )
        for name in BUFFERS:
            getattr(self.step, name).copy_(getattr(step, name))

    def run(self) -> list[Tensor]:
        step = self.memory._sanitizer.admit(self.step)
        self.memory.apply(self.plan.key, self.numbers, step)
        return self.read()

    def read(self) -> list[Tensor]:
        context = self.memory.context()
        query = self.step.keys[0]
        return [
            part for layer in range(len(self.step.keys)) for part in shown_to(context, layer, query)
        ]


# Neither window is a whole number of steps. Up to 192 prototypes all are points of a step.
@pytest.mark.parametrize(
    ("budget", "bits", "deep"), [(75, 8, False), (275, 8, True), (275, 32, False)]
)
@pytest.mark.parametrize("steps", [24, *slow(200)])
def test_a_recorded_step_is_replayed_to_equal_bytes(
    steps: int, budget: int, bits: int, deep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only a CPU reads in numpy, and works through a bank in parts.
    monkeypatch.setattr(arrays, "is_readable_by_numpy", lambda numbers: False)
    monkeypatch.setattr(rule, "_AT_ONCE", {})
    monkeypatch.setattr(repeats, "DEEP_MODEL_LAYERS", 1 if deep else 99)
    config = MemoryConfig.of("durable", budget=budget, center_bits=bits)
    world = World(shape_of(layers=2, heads=2, components=3), 1, things=300, noise=0.1, still=0.5)
    sink = world.sink()
    first = world.step(0, T)
    numbers = count(1)
    eager, replayed = streams = [
        Stream(build_memory(config, world.shape, world.rotary), first) for _ in range(2)
    ]
    for one in streams:
        one.memory.start(*sink)
    operations = None
    places = set()
    for warm in (budget // T + 4, 1):
        for _ in range(warm):
            step = world.step(next(numbers), T)
            for one in streams:
                one.tell(step)
                one.run()
        recording = addresses = None
        for index in range(steps // 2):
            step = world.step(next(numbers), T)
            for one in streams:
                one.tell(step)
            with Recording() as again:
                expected = eager.run()
            operations = operations or again.operations
            addresses = addresses or again.addresses
            # Shapes and scalars, too, before the resume and after it, in memory that does not move.
            assert (again.operations, again.addresses) == (operations, addresses)
            if recording is None:
                with Recording() as recording:
                    shown = replayed.run()
            else:
                recording.replay()
            assert same(copy_of(replayed.memory), copy_of(eager.memory))
            # What a question reads in between, every seventh time.
            assert all(map(torch.equal, shown if index % 7 else replayed.read(), expected))
            places.add(eager.memory._near._start)
        # A resume.
        restored = [
            restore_memory(config, world.shape, world.rotary, copy_of(one.memory), 10**6)
            for one in streams
        ]
        eager, replayed = streams = [Stream(memory, first) for memory in restored]
    assert len(places) > 10
