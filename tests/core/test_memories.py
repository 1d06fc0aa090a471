"""What every registered memory promises; a new one is tested here by being registered."""

import json
import re
from copy import deepcopy
from functools import cache
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from protokv.core.build import build_memory, restore_memory
from protokv.core.memory import Memory
from protokv.core.tensors import MemoryShape
from protokv.errors import ConfigError, StateCorrupt
from protokv.memories import MEMORIES, MemoryConfig, PaperConfig
from tests.core.streams import (
    World,
    copy_of,
    feed,
    same,
    shape_of,
    shown_to,
    small_config,
    small_durable,
)
from tests.oracles.invariants import check_bank

BUDGET = 29
# Steps of many lengths: one token, more than the near window of ProtoKV (8), more than the whole
# budget.
LENGTHS = [3, 1, 7, 1, 40, 2, 6, 5, 9, 30, 4, 7]


CASES: dict[str, MemoryConfig] = {
    kind: MemoryConfig.of(kind, budget=BUDGET) for kind in MEMORIES
} | {
    "paper-small": small_config(BUDGET),
    "paper-near-only": small_config(BUDGET, split=(1, 0)),
    "paper-far-only": small_config(BUDGET, split=(0, 1)),
    "paper-no-residual": small_config(BUDGET, residual=False, anchor="average"),
    "durable-32": small_durable(BUDGET),
    "durable-far-only": small_durable(BUDGET, split=(0, 1)),
}
HALF_PRECISION = ("paper-small", "durable", "infinipot-v")


@pytest.fixture(params=[*CASES, *(f"{name}-half" for name in HALF_PRECISION)])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def config(name: str) -> MemoryConfig:
    return CASES[name.removesuffix("-half")]


@pytest.fixture
def shape(name: str) -> MemoryShape:
    dtype = torch.bfloat16 if name.endswith("-half") else torch.float32
    return shape_of(layers=2, heads=3, size=16, components=3, sink=5, dtype=dtype)


def built(config: MemoryConfig, shape: MemoryShape, seed: int = 0) -> tuple[Memory, World]:
    world = World(shape, seed)
    return build_memory(config, shape, world.rotary), world


@cache
def _fed(config: MemoryConfig, shape: MemoryShape) -> Memory:
    memory, world = built(config, shape)
    feed(memory, world, LENGTHS)
    return memory


def fed(config: MemoryConfig, shape: MemoryShape) -> Memory:
    """A memory that has seen all of `LENGTHS`, a copy for one test."""
    return deepcopy(_fed(config, shape))


class Shown(NamedTuple):
    """`[L, H, N, D]` keys and values, `[L, H, N]` bias."""

    keys: Tensor
    values: Tensor
    bias: Tensor


def recalled(memory: Memory) -> Shown:
    """What all layers read for a question; one that retrieves does so by a query that is always the
    same.
    """
    L, H, _, D = memory.context().keys.shape
    context = memory.recall()
    query = torch.ones(2 * H, 3, D)
    return Shown(
        *map(
            torch.stack, zip(*(shown_to(context, layer, query) for layer in range(L)), strict=True)
        )
    )


def visible(memory: Memory) -> list[Tensor]:
    """Which slots attention can see, `[N]` bool of each layer and head."""
    return list((recalled(memory).bias > -torch.inf).flatten(0, 1))


def reads_within_budget(config: MemoryConfig) -> bool:
    """A memory that retrieves keeps everything and reads within its budget."""
    return MEMORIES[config.name].memory.bounded or config.name == "rekv"


def test_the_budget_holds_the_prefix_is_shown_and_the_footprint_stays(
    config: MemoryConfig, shape: MemoryShape
) -> None:
    memory, world = built(config, shape)
    keys, values = world.sink()
    memory.start(keys, values)
    sizes = {name: (tensor.shape, tensor.dtype) for name, tensor in memory.tensors().items()}
    bytes_by_part = memory.nbytes()
    slots = memory.context().keys.shape
    for index, tokens in enumerate(LENGTHS):
        memory.append(world.step(index, tokens))
        context = memory.context()
        assert torch.equal(context.keys[:, :, :5], keys)
        assert torch.equal(context.values[:, :, :5], values)
        assert (context.bias[:, :, :5] == 0).all()
        assert torch.isfinite(torch.stack((context.keys, context.values))).all()
        assert (context.bias < torch.inf).all()
        if "bank.mass" in memory.tensors():
            check_bank(memory.tensors())
        for seen in visible(memory):
            assert not reads_within_budget(config) or int(seen.sum()) <= BUDGET + 5
        if not memory.bounded:
            continue
        assert context.keys.shape == context.values.shape == slots
        now = {name: (tensor.shape, tensor.dtype) for name, tensor in memory.tensors().items()}
        gone = sizes.keys() - now.keys()
        # The one exception: the warm-up reservoir is dropped once the codebooks are fitted.
        assert all(name.startswith("warmup.") for name in gone)
        assert now == {name: size for name, size in sizes.items() if name not in gone}
        kept = {name: size for name, size in bytes_by_part.items() if name != "warmup" or not gone}
        assert memory.nbytes() == kept


def test_until_the_first_eviction_the_context_is_the_exact_tokens(
    config: MemoryConfig, shape: MemoryShape
) -> None:
    memory, world = built(config, shape)
    room = config.near_tokens if reads_within_budget(config) else 60
    lengths = [min(3, room)] * (room // 3) if room else []
    steps = feed(memory, world, lengths[: getattr(config, "last_steps", None)])
    lengths = lengths[: len(steps)]
    context = recalled(memory)
    for seen in visible(memory):
        assert int(seen.sum()) == 5 + sum(lengths)
        shown = seen.nonzero().squeeze(1)[5:]
        assert (context.bias[:, :, shown] == 0).all()
        for held, appended in (
            (context.keys, [s.keys for s in steps]),
            (context.values, [s.values for s in steps]),
        ):
            if steps:
                expected = torch.cat(appended, 2)
                # Softmax does not care about order, nor does this.
                order = (held[0, 0, shown][:, None] == expected[0, 0][None]).all(2).int().argmax(1)
                assert sorted(order.tolist()) == list(range(sum(lengths)))
                assert torch.equal(held[:, :, shown], expected[:, :, order])


def test_looking_changes_nothing_and_saved_tensors_share_no_memory(
    config: MemoryConfig, shape: MemoryShape
) -> None:
    memory = fed(config, shape)
    before = copy_of(memory)
    first = memory.context()
    keys = first.keys.clone()
    values = first.values.clone()
    bias = first.bias.clone()
    json.dumps(memory.report(), allow_nan=False)
    json.dumps(built(config, shape)[0].report(), allow_nan=False)
    memory.nbytes()
    again = memory.context()
    tensors = memory.tensors()
    assert same(before, tensors)
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    starts = [tensor.data_ptr() for tensor in tensors.values() if tensor.numel()]
    assert len(set(starts)) == len(starts)
    assert torch.equal(keys, again.keys)
    assert torch.equal(values, again.values)
    assert torch.equal(bias, again.bias)


def test_a_stream_continued_from_a_saved_state_is_the_same_stream(
    config: MemoryConfig, shape: MemoryShape
) -> None:
    whole, world = built(config, shape)
    sink = world.sink()
    steps = [world.step(index, tokens) for index, tokens in enumerate(LENGTHS)]
    whole.start(*sink)
    resumed = whole
    for index, step in enumerate(steps):
        if index in (1, 8):
            # The second time from what was resumed already.
            saved = copy_of(resumed)
            resumed, _ = built(config, shape)
            resumed.load(saved)
            assert same(copy_of(whole), copy_of(resumed))
        whole.append(step)
        # Reading or not reading the context makes no difference to what comes after.
        if index % 3:
            whole.context()
        if index:
            resumed.append(step)
    state = copy_of(whole)
    one = whole.context()
    other = resumed.context()
    # Another memory that was built, started and fed alike has the same bytes.
    assert same(state, copy_of(fed(config, shape)))
    assert same(state, copy_of(resumed))
    assert torch.equal(one.bias, other.bias)
    assert torch.equal(one.keys, other.keys)
    assert torch.equal(one.values, other.values)


def test_a_state_that_does_not_fit_is_refused_by_name(
    config: MemoryConfig, shape: MemoryShape
) -> None:
    good = copy_of(fed(config, shape))
    rotary = World(shape, 0).rotary
    bad = [("bank.extra", good | {"bank.extra": torch.zeros(1)})]
    for name, tensor in good.items():
        other_dtype = torch.float16 if tensor.dtype == torch.float64 else torch.float64
        bad += [
            (name, {other: held for other, held in good.items() if other != name}),
            (name, good | {name: torch.zeros(*tensor.shape, 1, dtype=tensor.dtype)}),
            (name, good | {name: tensor.to(other_dtype)}),
        ]
    if "near.ring" in good:
        start, count, last = good["near.ring"].tolist()
        for ring in (
            *([10**6, count, last], [start, 10**6, last], [start, -1, last]),
            *([start, count, last + 1], [start, count, 2**40]),
        ):
            bad.append(("near.ring", good | {"near.ring": torch.tensor(ring)}))
    if "kept.count" in good:
        far, near, last = good["kept.count"].tolist()
        for count in (
            [-1, near, last],
            [far, BUDGET, last],
            [far, -1, last],
            [10**9, near, last],
            [far, near, last + 1],
        ):
            bad.append(("kept.count", good | {"kept.count": torch.tensor(count)}))
    if "archive.lengths" in good:
        cut = good["archive.lengths"]
        twice = torch.cat((cut[:1] + cut[1:2], cut[2:], cut[:1] * 0))
        for lengths in (cut - 1, twice, torch.cat((cut[:2].sum()[None], cut[2:])), cut[:0]):
            bad.append(("archive.", good | {"archive.lengths": lengths}))
    for name, tensors in bad:
        with pytest.raises(StateCorrupt, match=re.escape(name)):
            restore_memory(config, shape, rotary, tensors, len(LENGTHS))


def test_numbers_and_steps_that_no_stream_leaves_are_refused_by_name(
    config: MemoryConfig, shape: MemoryShape
) -> None:
    good = copy_of(fed(config, shape))
    rotary = World(shape, 0).rotary
    bad = []
    for name in ("near.step", "bank.last_step", "kept.step"):
        if name in good and good[name].numel():
            bad.append((name, good | {name: good[name] + len(LENGTHS)}))
    for name, tensor in good.items():
        if tensor.is_floating_point() and tensor.numel():
            for number in (float("nan"), *([] if name == "rule.cost" else [float("inf"), -1e30])):
                one = tensor.clone()
                one.view(-1)[-1] = number
                bad.append((name, good | {name: one}))
    for name, tensors in bad:
        with pytest.raises(StateCorrupt, match=re.escape(name)):
            restore_memory(config, shape, rotary, tensors, len(LENGTHS))


def test_steps_out_of_order_are_refused(config: MemoryConfig, shape: MemoryShape) -> None:
    memory, world = built(config, shape)
    step = world.step(4, 3)
    with pytest.raises(RuntimeError, match="start"):
        memory.append(step)
    feed(memory, World(shape, 1), [2, 2])
    memory.append(step)
    with pytest.raises(ValueError, match="came after step 4"):
        memory.append(world.step(4, 3))


@settings(max_examples=30)
@given(
    st.sampled_from(sorted(MEMORIES)),
    st.lists(st.integers(1, 12), min_size=1, max_size=12),
    st.integers(9, 40),
    st.integers(0, 99),
)
def test_any_lengths_of_steps_keep_to_any_budget(
    name: str, lengths: list[int], budget: int, seed: int
) -> None:
    shape = shape_of(components=1, size=8)
    small = {config.name: config for config in (small_config(budget), small_durable(budget))}
    config = small.get(name) or MemoryConfig.of(name, budget=budget)
    memory, world = built(config, shape, seed)
    feed(memory, world, lengths)
    for seen in visible(memory):
        assert not reads_within_budget(config) or int(seen.sum()) <= budget + shape.sink_tokens
        exact = seen & (recalled(memory).bias[0, 0] == 0)
        assert int(exact.sum()) >= min(shape.sink_tokens + 1, int(seen.sum()))


def test_a_head_size_that_the_subquantizers_do_not_divide_is_refused_with_both_numbers() -> None:
    shape = shape_of(size=12)
    with pytest.raises(ConfigError, match=r"8.*12"):
        build_memory(PaperConfig(budget=512), shape, World(shape, 0).rotary)
    build_memory(
        PaperConfig(budget=512).with_fields({"residual": False}), shape, World(shape, 0).rotary
    )
