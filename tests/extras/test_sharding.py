"""A memory in parts, one for each device, is the memory of all layers: the same bytes, the same contexts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from protokv.config import DurableConfig, MemoryConfig
from protokv.core.context import Context, SlotContext
from protokv.core.memory import Memory
from protokv.core.tensors import MemoryShape
from protokv.errors import ConfigError, StateCorrupt
from protokv.extras.compact import compacted, far_span, next_position_of, shift_of
from protokv.extras.sharding import LayerShards, ShardedContext, runs_of
from protokv.memories import MEMORIES, build_memory
from tests.core.streams import World, anchored, copy_of, same, shape_of, shown_to, small_config, small_durable

BUDGET, LAYERS = 29, 5
LENGTHS = [3, 1, 7, 1, 40, 2, 6, 5, 9, 7, 30, 4, 6, 7, 5]
# All on one CPU, and yet different devices to whoever compares them.
CPU = [torch.device(name) for name in ("cpu", "cpu:0", "cpu:1")]
THREE = [CPU[0], CPU[1], CPU[1], CPU[1], CPU[2]]

REFUSED = ("dycoke-decode", "hermes")


CONFIGS = {name: MemoryConfig.of(name, budget=BUDGET) for name in MEMORIES if name not in REFUSED} | {
    "paper": small_config(BUDGET),
    "durable": DurableConfig(budget=BUDGET, center_bits=8),
    "agglomerative": small_durable(BUDGET),
    "blocked": DurableConfig(budget=BUDGET, rule="blocked", center_bits=32),
}
VARIANTS = {
    "centres in float32": DurableConfig(budget=BUDGET, center_bits=32),
    "residual, short warm-up": small_config(60, warmup_residuals=5),
    "residual, long warm-up": small_config(BUDGET, warmup_residuals=55, seed=7),
    "far only": small_config(BUDGET, split=(0, 1), anchor="first"),
    "no residual": small_config(BUDGET, residual=False, anchor="average"),
    "blocked, plans in turns": DurableConfig(budget=100, split=(0, 1), rule="blocked", center_bits=32),
}


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS.keys())
def config(request: pytest.FixtureRequest) -> MemoryConfig:
    return request.param


def whole_shape() -> MemoryShape:
    return shape_of(layers=LAYERS, heads=2, size=8, components=3, sink=4)


def both(config: MemoryConfig, devices: Sequence[torch.device], seed: int = 0) -> tuple[Memory, Memory, World]:
    """The memory of all layers and the one in parts, started, and a stream for both."""
    shape = whole_shape()
    world = World(shape, seed)
    memories = [
        build_memory(config, each, world.rotary) for each in (shape, replace(shape, layer_devices=tuple(devices)))
    ]
    sink = world.sink()
    for memory in memories:
        memory.start(*sink)
    assert isinstance(memories[1], LayerShards)
    return memories[0], memories[1], world


def read(context: Context, seed: int = 0) -> list[Tensor]:
    """What every layer reads, in turn, for the same random queries."""
    g = torch.Generator().manual_seed(seed)
    return [part for layer in range(LAYERS) for part in shown_to(context, layer, torch.randn(4, 3, 8, generator=g))]


def same_context(one: Context, other: Context) -> bool:
    numbers = [(context.visible_tokens(), shift_of(context), next_position_of(context)) for context in (one, other)]
    return numbers[0] == numbers[1] and all(map(torch.equal, read(one), read(other)))


@pytest.mark.parametrize("config", (CONFIGS | VARIANTS).values(), ids=(CONFIGS | VARIANTS).keys())
def test_the_state_and_what_every_layer_reads_are_those_of_the_whole(config: MemoryConfig) -> None:
    # The first device has the first layer and the last ones.
    whole, parts, world = both(config, [CPU[0], CPU[1], CPU[0], CPU[0], CPU[0]])
    for index, tokens in enumerate(LENGTHS):
        step, features = world.step(index, tokens), torch.randn(12, 6, generator=world.generator)
        one, other = (memory.select(features, (3, 4)) for memory in (whole, parts))
        assert (one is None and other is None) or torch.equal(one, other)
        whole.append(step)
        parts.append(step)
        if index % 7 == 0 or index == len(LENGTHS) - 1:
            assert same(copy_of(whole), copy_of(parts))
            assert same_context(whole.context(), parts.context())
            assert same_context(whole.recall(), parts.recall())
    assert whole.report() == parts.report()
    assert whole.nbytes().keys() == parts.nbytes().keys()


def test_compact_positions_are_those_of_the_whole(config: MemoryConfig) -> None:
    whole, parts, world = both(config, THREE, seed=3)
    anchoring = anchored(world, 4)
    moved = 0
    for index, tokens in enumerate(LENGTHS):
        step = world.step(index, tokens)
        whole.append(step)
        parts.append(step)
        if index % 6:
            continue
        for one, other in ((whole.context(), parts.context()), (whole.recall(), parts.recall())):
            span = far_span(one)
            assert far_span(other) == span
            ours, theirs = compacted(one, anchoring, span), compacted(other, anchoring, span)
            assert (shift_of(ours), next_position_of(ours)) == (shift_of(theirs), next_position_of(theirs))
            assert all(map(torch.equal, read(ours), read(theirs)))
            moved += shift_of(ours) > 0
    assert moved or config.name in ("full", "rekv")


def test_a_state_of_parts_continues_whole_and_one_of_the_whole_in_parts(config: MemoryConfig) -> None:
    whole, parts, world = both(config, THREE)
    resumed: list[Memory] = []
    for index, tokens in enumerate(LENGTHS):
        if index == 8:
            now_whole, now_parts, _ = both(config, THREE, seed=1)
            now_whole.load(copy_of(parts))
            now_parts.load(copy_of(whole))
            resumed = [now_whole, now_parts]
        step = world.step(index, tokens)
        for memory in (whole, parts, *resumed):
            memory.append(step)
    assert resumed
    assert all(same(copy_of(whole), copy_of(memory)) for memory in resumed)


def test_a_state_that_does_not_fit_is_refused_by_name_and_changes_no_part(config: MemoryConfig) -> None:
    _, parts, world = both(config, THREE)
    for index, tokens in enumerate(LENGTHS[:9]):
        parts.append(world.step(index, tokens))
    good = copy_of(parts)
    for name, tensor in good.items():
        missing = {other: held for other, held in good.items() if other != name}
        reshaped = good | {name: torch.zeros(*tensor.shape, 1, dtype=tensor.dtype)}
        for bad in (missing, reshaped):
            with pytest.raises(StateCorrupt, match=name.replace(".", r"\.")):
                parts.load(bad)
    one_layer_more = good | {"sink.keys": torch.cat((good["sink.keys"], good["sink.keys"][:1]))}
    with pytest.raises(StateCorrupt, match=r"sink\.keys must be \[5, "):
        parts.load(one_layer_more)
    with pytest.raises(StateCorrupt, match=r"bank\.extra"):
        parts.load(good | {"bank.extra": torch.zeros(1)})
    assert same(good, copy_of(parts))


def test_a_fault_that_only_the_last_part_sees_changes_no_part() -> None:
    config = small_config(BUDGET)
    _, parts, world = both(config, THREE)
    for index, tokens in enumerate(LENGTHS[:12]):
        parts.append(world.step(index, tokens))
    good = copy_of(parts)
    parts.append(world.step(12, 7))
    now = copy_of(parts)
    good["bank.mass"][-1, 0, 0] = -1
    with pytest.raises(StateCorrupt, match=r"bank\.mass"):
        parts.load(good)
    assert same(now, copy_of(parts))


def test_a_reservoir_that_some_parts_have_dropped_is_joined_as_the_whole_holds_it() -> None:
    config = small_config(BUDGET, warmup_residuals=40)
    whole, parts, world = both(config, [CPU[0], CPU[0], CPU[0], CPU[1], CPU[1]])
    dropped = []
    for index in range(46):
        step = world.step(index, 4)
        # The last two layers stand still for a while: everything is merged, nothing is absorbed with a residual.
        step = replace(step, keys=step.keys.clone(), values=step.values.clone())
        if index < 30:
            step.keys[3:], step.values[3:] = step.keys[3:, :, :1], 0.0
        whole.append(step)
        parts.append(step)
        if index % 5 == 0:
            assert same(copy_of(whole), copy_of(parts))
        dropped.append(["warmup.keys" in part.tensors() for part in parts._parts])
    assert [False, True] in dropped
    assert dropped[-1] == [False, False]


@pytest.mark.parametrize("name", REFUSED)
def test_a_memory_whose_layers_look_at_each_other_is_refused_with_what_to_do(name: str) -> None:
    shape = replace(whole_shape(), layer_devices=(CPU[0],) * 3 + (CPU[1],) * 2)
    with pytest.raises(ConfigError, match=f"{name} cannot be spread") as caught:
        build_memory(MemoryConfig.of(name), shape, World(shape, 0).rotary)
    assert "one device" in caught.value.hint


def test_layers_on_one_device_are_one_memory(config: MemoryConfig) -> None:
    shape = replace(whole_shape(), layer_devices=(CPU[1],) * LAYERS)
    assert type(build_memory(config, shape, World(shape, 0).rotary)) is MEMORIES[config.name]


def test_runs_are_the_longest_of_one_device_in_order() -> None:
    runs = runs_of([CPU[0], CPU[0], CPU[1], CPU[0]])
    assert [(run.start, run.stop, run.device) for run in runs] == [(0, 2, CPU[0]), (2, 3, CPU[1]), (3, 4, CPU[0])]


@given(seed=st.integers(0, 999), newest=st.integers(3, 60), near=st.booleans())
def test_parts_that_end_at_different_times_are_moved_as_the_whole_is(seed: int, newest: int, near: bool) -> None:
    g = torch.Generator().manual_seed(seed)
    size, origin = (LAYERS, 2, 9, 8), 2
    places = torch.zeros(*size[:3], 1, dtype=torch.int64)
    # Slots [2 sink | 4 far | 3 near]; the far ones of the last two layers are older than those of the others.
    places[:, :, :2, 0] = torch.arange(2)
    places[:, :, 2:6, 0] = torch.randint(origin, origin + newest, (LAYERS, 2, 4), generator=g)
    places[3:, :, 2:6, 0] = torch.randint(origin, origin + 3, (2, 2, 4), generator=g)
    places[:, :, 6:, 0] = origin + newest + torch.arange(3)
    bias = torch.zeros(size[:3])
    bias[:, :, 2:6][torch.rand(LAYERS, 2, 4, generator=g) < 0.4] = -torch.inf
    bias[:, :, 6:] = 0.0 if near else -torch.inf
    keys = torch.randn(size, generator=g)

    def of(layers: slice) -> SlotContext:
        return SlotContext(keys[layers], keys[layers], bias[layers], slice(2, 6), lambda: places[layers])

    runs = runs_of([CPU[0]] * 3 + [CPU[1]] * 2)
    whole, parts = of(slice(None)), ShardedContext(runs, [of(run.layers) for run in runs])
    anchoring = anchored(World(whole_shape(), 0), origin)
    assert far_span(parts) == far_span(whole)
    for span in (far_span(whole), far_span(whole) + 4):
        assert same_context(compacted(whole, anchoring, span), compacted(parts, anchoring, span))
