"""Numbers that are not finite: whatever a step holds, a memory goes on, counts what it dropped, and
its state loads.
"""

from dataclasses import replace

import pytest
import torch

from protokv.core.build import build_memory
from protokv.core.memory import Memory
from protokv.core.step import StepKV
from protokv.memories import MEMORIES, MemoryConfig
from tests.core.streams import World, copy_of, same, shape_of, small_config, small_durable

BUDGET = 29
CASES: dict[str, MemoryConfig] = {
    name: MemoryConfig.of(name, budget=BUDGET) for name in MEMORIES
} | {
    "paper, small": small_config(BUDGET),
    "durable, 32 bits": small_durable(BUDGET),
}
WORST = [float("nan"), float("inf"), -float("inf"), 3e38, -3e38]


def spoilt(
    step: StepKV, tokens: list[int], number: float, *, of_values: bool = False, head: int = 0
) -> StepKV:
    """A step with one number of some tokens replaced, in one layer and head."""
    keys = step.keys.clone()
    values = step.values.clone()
    (values if of_values else keys)[-1, head, tokens, 1] = number
    return replace(step, keys=keys, values=values)


def stream(memory: Memory, world: World, steps: int, bad: dict[int, list[int]]) -> None:
    """Steps of five tokens, some of them spoilt by one of the worst numbers."""
    for index in range(steps):
        step = world.step(index, 5)
        tokens = bad.get(index, [])
        number = WORST[index % len(WORST)]
        memory.append(spoilt(step, tokens, number, of_values=index % 2 == 1) if tokens else step)


@pytest.fixture(params=[*CASES.values()], ids=[*CASES])
def config(request: pytest.FixtureRequest) -> MemoryConfig:
    return request.param


def test_a_number_that_is_not_finite_stops_nothing_and_is_counted(config: MemoryConfig) -> None:
    world = World(shape_of(layers=2, heads=2, size=8), 3)
    memory = build_memory(config, world.shape, world.rotary)
    memory.start(*world.sink())
    # Each of the worst numbers once, in keys and in values.
    bad = {0: [0], 3: [1, 4], 4: [0, 1, 2, 3, 4], 11: [2], 17: [4]}
    stream(memory, world, 20, bad)
    assert memory.report()["tokens_dropped"] == 10
    state = copy_of(memory)
    assert all(
        torch.isfinite(tensor).all() for tensor in state.values() if tensor.is_floating_point()
    )
    other = build_memory(config, world.shape, world.rotary)
    other.load(state)
    for index in range(20, 26):
        step = world.step(index, 5)
        memory.append(step)
        other.append(step)
    assert same(copy_of(memory), copy_of(other))


def test_the_bank_is_what_it_would_be_without_the_dropped_tokens() -> None:
    config = small_config(28, split=(0, 1))
    world = World(shape_of(layers=2, heads=2, size=8), 3)
    spoilt_one, without = (build_memory(config, world.shape, world.rotary) for _ in range(2))
    sink = world.sink()
    for memory in (spoilt_one, without):
        memory.start(*sink)
    for index in range(24):
        step = world.step(index, 12)
        bad = [0, 3] if index % 4 == 1 else []
        spoilt_one.append(spoilt(step, bad, float("inf")) if bad else step)
        without.append(step.tokens(torch.tensor([t for t in range(12) if t not in bad])))
    ours = copy_of(spoilt_one)
    theirs = copy_of(without)
    assert int(ours["sanitize.dropped"]) == 12
    names = [name for name in ours if name.startswith(("bank.", "residual.", "codebook."))]
    assert all(torch.equal(ours[name], theirs[name]) for name in names)
