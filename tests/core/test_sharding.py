"""A memory in parts, one for each device, is the memory of all layers: the same bytes, the same
contexts.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from protokv.core.build import build_memory
from protokv.core.context import Context
from protokv.core.memory import Memory
from protokv.core.sharding import LayerShards
from protokv.core.tensors import MemoryShape
from protokv.errors import ConfigError
from protokv.memories import MEMORIES, DurableConfig, MemoryConfig
from protokv.memories.durable import repeats, rule
from tests.core.streams import (
    World,
    anchored,
    copy_of,
    same,
    shape_of,
    shown_to,
    small_config,
    small_durable,
)

BUDGET = 29
LAYERS = 4
LENGTHS = [3, 1, 7, 1, 40, 2, 6, 1, 9, 4, 7]
# Two devices for torch, although both are one CPU. Three runs, of which two stand on one device.
FIRST = torch.device("cpu")
SECOND = torch.device("cpu:0")
DEVICES = (FIRST, SECOND, SECOND, FIRST)

REFUSED = ("hermes",)


def configs() -> list[object]:
    quick = ("paper, short warm-up", "durable, words apart", "sliding-window", "rekv")
    variants = {
        "paper, short warm-up": small_config(60, warmup_residuals=5),
        "paper, far only": small_config(BUDGET, split=(0, 1), anchor="first"),
        "durable, 32 bits": small_durable(BUDGET),
        "durable, words apart": DurableConfig(budget=BUDGET, words=True),
    }
    others = {
        name: MemoryConfig.of(name, budget=BUDGET) for name in MEMORIES if name not in REFUSED
    }
    return [
        pytest.param(config, id=name, marks=[] if name in quick else pytest.mark.wide)
        for name, config in (variants | others).items()
    ]


@pytest.fixture(autouse=True)
def _deep(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stays in view enters the bank of `durable` once, and not all prototypes are points of a
    short step.
    """
    monkeypatch.setattr(repeats, "DEEP_MODEL_LAYERS", 1)
    monkeypatch.setattr(rule, "WHOLE_BANK_PROTOTYPES", 6)


@pytest.fixture(params=configs())
def config(request: pytest.FixtureRequest) -> MemoryConfig:
    return request.param


def whole_shape() -> MemoryShape:
    return shape_of(layers=LAYERS, heads=2, size=8, components=3, sink=4)


def both(
    config: MemoryConfig, devices: Sequence[Any] = DEVICES, seed: int = 0
) -> tuple[Memory, Memory, World]:
    """Start the memory of all layers and the one in parts; return them and a stream for both."""
    shape = whole_shape()
    world = World(shape, seed, still=0.5)
    memories = [
        build_memory(config, each, world.rotary)
        for each in (shape, replace(shape, layer_devices=tuple(devices)))
    ]
    sink = world.sink()
    for memory in memories:
        memory.start(*sink)
    assert isinstance(memories[1], LayerShards)
    return memories[0], memories[1], world


def read(context: Context, seed: int = 0) -> list[Tensor]:
    """Return the tensors that each layer reads for the same random queries."""
    g = torch.Generator().manual_seed(seed)
    return [
        part
        for layer in range(LAYERS)
        for part in shown_to(context, layer, torch.randn(4, 3, 8, generator=g))
    ]


def same_context(one: Context, other: Context) -> bool:
    numbers = [
        (context.visible_tokens(), context.shift, context.next_position) for context in (one, other)
    ]
    return numbers[0] == numbers[1] and all(map(torch.equal, read(one), read(other)))


def test_states_and_contexts_are_those_of_the_whole_and_each_continues_the_other(
    config: MemoryConfig,
) -> None:
    whole, parts, world = both(config)
    anchoring = anchored(world, 4)
    moved = 0
    continued = []
    for index, tokens in enumerate(LENGTHS):
        if index == 7:
            continued = list(both(config, seed=1)[:2])
            for memory, other in zip(continued, (parts, whole), strict=True):
                memory.load(copy_of(other))
        step = replace(world.step(index, tokens), words=tokens // 3)
        features = torch.randn(12, 6, generator=world.generator)
        memories = (whole, parts, *continued)
        one, *others = [memory.select(features, (3, 4)) for memory in memories]
        for found in others:
            assert (one is None) == (found is None)
            assert one is None or found is None or torch.equal(one, found)
        for memory in memories:
            memory.append(step)
        if index % 4:
            continue
        assert same(copy_of(whole), copy_of(parts))
        pairs = [(whole.context(), parts.context()), (whole.recall(), parts.recall())]
        if not MEMORIES[config.name].memory.retrieves:
            time = int(step.positions[:, 0].min())
            pairs.append((whole.context().before(time), parts.context().before(time)))
        for ours, theirs in pairs:
            assert same_context(ours, theirs)
            span = ours.far_span()
            assert theirs.far_span() == span
            ours = ours.compact(anchoring, span)
            theirs = theirs.compact(anchoring, span)
            assert same_context(ours, theirs)
            moved += int(ours.shift > 0)
    assert len(continued) == 2
    assert all(same(copy_of(whole), copy_of(memory)) for memory in (parts, *continued))
    assert moved or config.name in ("full", "rekv", "first-tokens")
    assert whole.report() == parts.report()
    assert whole.nbytes().keys() == parts.nbytes().keys()


def test_a_reservoir_that_some_parts_have_dropped_is_joined_as_the_whole_holds_it() -> None:
    config = small_config(BUDGET, warmup_residuals=20)
    whole, parts, world = both(config, [FIRST, FIRST, SECOND, SECOND])
    shards: Any = parts
    dropped = []
    for index in range(32):
        step = world.step(index, 4)
        # The last two layers stand still for a while: everything is merged, nothing is absorbed
        # with a residual.
        step = replace(step, keys=step.keys.clone(), values=step.values.clone())
        if index < 20:
            step.keys[2:], step.values[2:] = step.keys[2:, :, :1], 0.0
        whole.append(step)
        parts.append(step)
        assert same(copy_of(whole), copy_of(parts))
        dropped.append(["warmup.keys" in part.tensors() for part in shards._parts])
    assert [False, True] in dropped
    assert dropped[-1] == [False, False]


@pytest.mark.parametrize("name", REFUSED)
def test_a_memory_whose_layers_look_at_each_other_is_refused_with_advice(name: str) -> None:
    shape = replace(whole_shape(), layer_devices=DEVICES)
    with pytest.raises(ConfigError, match=f"{name} cannot be divided") as caught:
        build_memory(MemoryConfig.of(name), shape, World(shape, 0).rotary)
    assert "one device" in caught.value.hint


def test_layers_on_one_device_are_one_memory(config: MemoryConfig) -> None:
    shape = replace(whole_shape(), layer_devices=(SECOND,) * LAYERS)
    assert type(build_memory(config, shape, World(shape, 0).rotary)) is MEMORIES[config.name].memory
