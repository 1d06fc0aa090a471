"""`MemoryTests`: what every memory promises."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor

from protokv.core.build import build_memory, restore_memory
from protokv.core.memory import Memory
from protokv.core.packing import trim_unused_slots
from protokv.core.settings import MemoryConfig
from protokv.core.tensors import MemoryShape, TensorDict
from protokv.errors import StateCorrupt
from protokv.testing.streams import (
    ToyStream,
    copy_tensors,
    feed,
    have_equal_bits,
    make_shape,
    read_layer,
    read_slots,
)

# Steps of one token, of some, and of more than a small budget.
LENGTHS = (3, 1, 7, 1, 40, 2, 6, 5, 9, 30, 4, 7)


class Shown(NamedTuple):
    """`[L, H, N, D]` keys and values, `[L, H, N]` bias."""

    keys: Tensor
    values: Tensor
    bias: Tensor


class MemoryTests:
    """What every memory promises; a subclass names the settings to be tested in `configs`.

    Budgets of 20 to 60 tokens fill and evict within the `LENGTHS` of the stream.
    """

    configs: ClassVar[Sequence[MemoryConfig]]

    @pytest.fixture
    def shape(self) -> MemoryShape:
        """The model that the memory serves."""
        return make_shape(heads=3, size=16, components=3, sink=5)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run each test under all settings."""
        if "config" in metafunc.fixturenames:
            names = [f"{one.name}-{number}" for number, one in enumerate(self.configs)]
            metafunc.parametrize("config", list(self.configs), ids=names)

    def check(self, memory: Memory) -> None:
        """Assert what else holds of this kind of memory after each step."""

    def damage(self, good: TensorDict) -> list[tuple[str, TensorDict]]:
        """Return further states that must be refused, with the tensor that the error names."""
        return []

    def test_the_budget_holds_the_prefix_is_shown_and_the_footprint_stays(
        self, config: MemoryConfig, shape: MemoryShape
    ) -> None:
        """Attention reads at most the budget, and no tensor grows."""
        memory, stream = build(config, shape)
        keys, values = stream.sink()
        memory.start(keys, values)
        P0 = shape.sink_tokens
        sizes = {name: (tensor.shape, tensor.dtype) for name, tensor in memory.tensors().items()}
        bytes_by_part = memory.nbytes()
        slots = read_slots(memory).keys.shape
        for index, tokens in enumerate(LENGTHS):
            memory.append(stream.step(index, tokens))
            context = read_slots(memory)
            assert torch.equal(context.keys[:, :, :P0], keys)
            assert torch.equal(context.values[:, :, :P0], values)
            assert (context.bias[:, :, :P0] == 0).all()
            assert torch.isfinite(torch.stack((context.keys, context.values))).all()
            assert (context.bias < torch.inf).all()
            self.check(memory)
            for seen in find_visible(memory):
                assert not reads_within_budget(memory) or int(seen.sum()) <= config.budget + P0
            if not memory.bounded:
                continue
            assert context.keys.shape == context.values.shape == slots
            now = {name: (tensor.shape, tensor.dtype) for name, tensor in memory.tensors().items()}
            assert now.items() <= sizes.items()
            # Tensors of a warm-up may go when it is over.
            assert all(name.startswith("warmup.") for name in sizes.keys() - now.keys())
            assert memory.nbytes().items() <= bytes_by_part.items()

    def test_until_the_first_eviction_the_context_is_the_exact_tokens(
        self, config: MemoryConfig, shape: MemoryShape
    ) -> None:
        """A stream that fits is shown whole."""
        memory, stream = build(config, shape)
        room = config.near_tokens if reads_within_budget(memory) else 60
        lengths = [min(3, room)] * (room // 3) if room else []
        steps = feed(memory, stream, lengths[: getattr(config, "last_steps", None)])
        tokens = sum(lengths[: len(steps)])
        context = recall(memory)
        for seen in find_visible(memory):
            assert int(seen.sum()) == shape.sink_tokens + tokens
            shown = seen.nonzero().squeeze(1)[shape.sink_tokens :]
            assert (context.bias[:, :, shown] == 0).all()
            if steps:
                held = torch.cat((context.keys, context.values), -1)[:, :, shown]
                pairs = [torch.cat((step.keys, step.values), -1) for step in steps]
                # Softmax does not care about order, nor does this.
                assert torch.equal(sort_tokens(held), sort_tokens(torch.cat(pairs, 2)))

    def test_looking_changes_nothing_and_saved_tensors_share_no_memory(
        self, config: MemoryConfig, shape: MemoryShape
    ) -> None:
        """Context, report and bytes change no state."""
        memory = build_fed(config, shape)
        before = copy_tensors(memory)
        other = build_fed(config, shape)
        json.dumps(memory.report(), allow_nan=False)
        json.dumps(build(config, shape)[0].report(), allow_nan=False)
        memory.nbytes()
        tensors = memory.tensors()
        assert have_equal_bits(before, tensors)
        assert all(tensor.is_contiguous() for tensor in tensors.values())
        starts = [tensor.data_ptr() for tensor in tensors.values() if tensor.numel()]
        assert len(set(starts)) == len(starts)
        assert show_the_same(memory, other)

    def test_a_stream_continued_from_a_saved_state_is_the_same_stream(
        self, config: MemoryConfig, shape: MemoryShape
    ) -> None:
        """A state that is loaded goes on to the same bytes."""
        whole, stream = build(config, shape)
        sink = stream.sink()
        steps = [stream.step(index, tokens) for index, tokens in enumerate(LENGTHS)]
        whole.start(*sink)
        resumed = whole
        for index, step in enumerate(steps):
            if index in (1, 8):
                # The second time from what was resumed already.
                saved = trim_unused_slots(copy_tensors(resumed), resumed.specs())
                resumed, _ = build(config, shape)
                resumed.load(saved)
                assert have_equal_bits(copy_tensors(whole), copy_tensors(resumed))
                # What was written step by step is what a state tells.
                assert show_the_same(whole, resumed)
            whole.append(step)
            # Reading or not reading the context makes no difference to what comes after.
            if index % 3:
                whole.context()
            if index:
                resumed.append(step)
        # Another memory that was built, started and fed alike has the same bytes.
        for other in (resumed, build_fed(config, shape)):
            assert have_equal_bits(copy_tensors(whole), copy_tensors(other))
            assert show_the_same(whole, other)

    def test_a_state_that_does_not_fit_is_refused_by_name(
        self, config: MemoryConfig, shape: MemoryShape
    ) -> None:
        """A tensor too many, too few, or of another form is refused."""
        good = copy_tensors(build_fed(config, shape))
        rotary = ToyStream(shape, 0).rotary
        bad = [("bank.extra", good | {"bank.extra": torch.zeros(1)}), *self.damage(good)]
        for name, tensor in good.items():
            other_dtype = torch.float16 if tensor.dtype == torch.float64 else torch.float64
            bad += [
                (name, {other: held for other, held in good.items() if other != name}),
                (name, good | {name: torch.zeros(*tensor.shape, 1, dtype=tensor.dtype)}),
                (name, good | {name: tensor.to(other_dtype)}),
            ]
        for name, tensors in bad:
            with pytest.raises(StateCorrupt, match=re.escape(name)):
                restore_memory(config, shape, rotary, tensors, len(LENGTHS))

    def test_steps_out_of_order_are_refused(self, config: MemoryConfig, shape: MemoryShape) -> None:
        """No step comes before the prompt prefix, or twice."""
        memory, stream = build(config, shape)
        step = stream.step(4, 3)
        with pytest.raises(RuntimeError, match="start"):
            memory.append(step)
        feed(memory, build(config, shape, 1)[1], [2, 2])
        memory.append(step)
        with pytest.raises(ValueError, match="came after step 4"):
            memory.append(stream.step(4, 3))


def build(config: MemoryConfig, shape: MemoryShape, seed: int = 0) -> tuple[Memory, ToyStream]:
    """Return an empty memory, and a stream that brings all that it reads."""
    heads = 2 * shape.kv_heads if config.memory.reads_queries else 0
    stream = ToyStream(shape, seed, query_heads=heads)
    return build_memory(config, shape, stream.rotary), stream


def build_fed(config: MemoryConfig, shape: MemoryShape) -> Memory:
    """Return a memory that has seen all of `LENGTHS`."""
    memory, stream = build(config, shape)
    feed(memory, stream, LENGTHS)
    return memory


def show_the_same(one: Memory, other: Memory) -> bool:
    """Return True if new steps attend to equal numbers in equal slots."""
    ours = read_slots(one)
    theirs = read_slots(other)
    return all(
        torch.equal(getattr(ours, name), getattr(theirs, name))
        for name in ("keys", "values", "bias")
    )


def recall(memory: Memory) -> Shown:
    """Return what all layers read for a question; one that retrieves does so by a query that is
    always the same.
    """
    L, H, _, D = read_slots(memory).keys.shape
    context = memory.recall()
    query = torch.ones(2 * H, 3, D)
    layers = [read_layer(context, layer, query) for layer in range(L)]
    return Shown(*map(torch.stack, zip(*layers, strict=True)))


def sort_tokens(tokens: Tensor) -> Tensor:
    """Return tokens `[..., n, D]` in the order of their first number."""
    order = tokens[..., :1].argsort(-2).expand_as(tokens)
    return tokens.gather(-2, order)


def find_visible(memory: Memory) -> list[Tensor]:
    """Return which slots attention can see, `[N]` bool of each layer and head."""
    return list((recall(memory).bias > -torch.inf).flatten(0, 1))


def reads_within_budget(memory: Memory) -> bool:
    """Return True if attention reads at most the budget. One that retrieves keeps everything."""
    return memory.bounded or memory.retrieves
