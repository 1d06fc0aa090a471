"""`ReKV`: retrieval equals a literal loop over blocks; nothing is missing until the budget is
exceeded.
"""

from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from protokv.core.build import build_memory
from protokv.core.rotary import rotate, unrotate
from protokv.core.step import StepKV
from protokv.core.tensors import MemoryShape
from protokv.memories import ReKVConfig
from protokv.memories.rekv import ReKV, RetrievalContext
from tests.core.streams import World, anchored, feed, shape_of, shown_to
from tests.tolerance import Tolerance, tolerance

QUESTION = "what is the first star ?"
LENGTHS = st.lists(st.integers(1, 11), min_size=1, max_size=24)
SINK = 2


def built(shape: MemoryShape, seed: int = 0, **settings: Any) -> tuple[ReKV, World]:
    world = World(shape, seed)
    memory = build_memory(ReKVConfig(**settings), shape, world.rotary)
    assert isinstance(memory, ReKV)
    return memory, world


def recalled(memory: ReKV) -> RetrievalContext:
    context = memory.recall()
    assert isinstance(context, RetrievalContext)
    return context


def question(shape: MemoryShape, groups: int, seed: int, tokens: int = 4) -> Tensor:
    """Return a query before rotation, `[L, Hq, T, D]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(
        shape.layers, shape.kv_heads * groups, tokens, shape.head_size, generator=generator
    )


def rotated(context: RetrievalContext, world: World, bare: Tensor) -> Tensor:
    """Return the query as the model passes it, rotated to the position that the context names."""
    line = context.next_position + torch.arange(bare.shape[-2])
    return rotate(bare, world.rotary(line[:, None].expand(-1, world.shape.position_components)))


def near_rotated(keys: Tensor, newest: int) -> Tolerance:
    """Return the tolerance for keys rotated from one position to another: angles up to `newest`
    radians are rounded.
    """
    angles = tolerance(keys.dtype, 2, newest)
    return {"rtol": 0.0, "atol": (angles + tolerance(keys.dtype, 8)) * float(keys.abs().max())}


def blocks_of(steps: list[StepKV], budget: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return keys, values and positions of each block of the steps."""
    return [
        (
            step.keys[:, :, at : at + budget],
            step.values[:, :, at : at + budget],
            step.positions[at : at + budget],
        )
        for step in steps
        for at in range(0, len(step.positions), budget)
    ]


def literal_choice(
    blocks: list[tuple[Tensor, Tensor, Tensor]], bare: Tensor, world: World, budget: int
) -> list[int]:
    """Apply the published rule to one layer's query `[Hq, T, D]` and that layer's blocks, one block
    at a time.
    """
    query_heads = bare.shape[0]
    wanted = torch.cat(
        [
            torch.stack([bare[h, t] for t in range(bare.shape[1])]).mean(0)
            for h in range(query_heads)
        ]
    )
    scores = []
    for keys, _, positions in blocks:
        without = [
            unrotate(keys[:, t].float(), world.rotary(positions[t])) for t in range(len(positions))
        ]
        mean = torch.stack(without).sum(0) / len(without)
        groups = query_heads // len(mean)
        scores.append(float(torch.cat([mean[h // groups] for h in range(query_heads)]) @ wanted))
    chosen = []
    tokens = 0
    for index in sorted(range(len(blocks)), key=lambda index: -scores[index]):
        tokens += len(blocks[index][2])
        if tokens > budget:
            break
        chosen.append(index)
    return sorted(chosen)


@given(
    LENGTHS
    | st.tuples(st.integers(1, 9), st.integers(1, 12)).map(lambda pair: [pair[0]] * pair[1]),
    st.integers(3, 40),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([(1, (0,)), (3, (0,)), (3, (0, 1, 2))]),
    st.integers(0, 99),
)
def test_layers_read_what_a_literal_loop_chooses_and_packed_blocks_follow_each_other(
    lengths: list[int], budget: int, groups: int, axes: tuple[int, tuple[int, ...]], seed: int
) -> None:
    components, moving = axes
    shape = shape_of(layers=3, heads=2, components=components, sink=SINK)
    memory, world = built(shape, seed, budget=budget)
    steps = feed(memory, world, lengths)
    blocks = blocks_of(deepcopy(steps), budget)
    for step in steps:
        # The caller may reuse its tensors.
        for tensor in (step.keys, step.values, step.positions):
            tensor.zero_()
    stream = recalled(memory)
    packed = stream.compact(anchored(world, SINK, moving=moving), stream.far_span())
    assert (packed is stream) == (sum(lengths) <= budget)
    bare = question(shape, groups, seed)
    still = [axis for axis in range(components) if axis not in moving]
    ends = [packed.packed_end, *(int(p[:, axis].max()) + 1 for *_, p in blocks for axis in still)]
    for layer in range(shape.layers):
        own = [(k[layer], v[layer], p) for k, v, p in blocks]
        # The question's position does not change the choice.
        chosen = [own[index] for index in literal_choice(own, bare[layer], world, budget)]
        keys = torch.cat([one for one, _, _ in chosen], 1)
        values = torch.cat([one for _, one, _ in chosen], 1)
        n = keys.shape[1]
        for context in (stream, packed):
            found, shown, bias = shown_to(context, layer, rotated(context, world, bare[layer]))
            assert found.shape[1] == SINK + min(budget, sum(lengths))
            if context is stream:
                assert torch.equal(found[:, SINK : SINK + n], keys)
            else:
                keys, last = turned(chosen, moving, packed.packed_end, world)
                ends.append(last + 1)
                allowed = near_rotated(keys, sum(lengths))
                torch.testing.assert_close(found[:, SINK : SINK + n], keys, **allowed)
            assert torch.equal(shown[:, SINK : SINK + n], values)
            assert (bias[:, : SINK + n] == 0).all()
            assert (bias[:, SINK + n :] == -torch.inf).all()
    assert SINK < stream.visible_tokens() <= SINK + budget
    if packed is not stream:
        assert int(blocks[-1][2][:, 0].max()) + 1 - packed.shift == packed.packed_end
        assert packed.next_position == max(ends)
        assert components > 1 or packed.next_position <= SINK + budget


def turned(
    chosen: list[tuple[Tensor, Tensor, Tensor]], moving: tuple[int, ...], end: int, world: World
) -> tuple[Tensor, int]:
    """Return keys of chosen blocks that follow each other up to `end`, and their last position."""
    axes = list(moving)
    spans = [int(p[:, axes].max() - p[:, axes].min()) + 1 for _, _, p in chosen]
    start = end - sum(spans)
    assert start >= SINK
    found = []
    last = 0
    for (keys, _, here), span in zip(chosen, spans, strict=True):
        there = here.clone()
        there[:, axes] += start - int(here[:, axes].min())
        start += span
        found.append(rotate(unrotate(keys, world.rotary(here)), world.rotary(there)))
        last = max(last, int(there.max()))
    return torch.cat(found, 1), last


def test_the_question_chooses_and_the_answer_reads_on() -> None:
    shape = shape_of(sink=SINK)
    memory, world = built(shape, budget=8)
    feed(memory, world, [4] * 10)
    context = recalled(memory)
    one = question(shape, 1, 1)
    other = question(shape, 1, 2, tokens=1)
    first = [shown_to(context, layer, rotated(context, world, one[layer])) for layer in range(2)]
    again = [shown_to(context, layer, rotated(context, world, other[layer])) for layer in range(2)]
    assert all(
        torch.equal(a, b)
        for x, y in zip(first, again, strict=True)
        for a, b in zip(x, y, strict=True)
    )
    # Another question is another recall, and may read other blocks: layers and questions choose for
    # themselves.
    fresh = recalled(memory)
    differs = [shown_to(fresh, layer, rotated(fresh, world, -one[layer]))[0] for layer in range(2)]
    assert not torch.equal(differs[0], first[0][0])


@pytest.mark.parametrize("before", ["nothing", "start"])
def test_a_stream_that_has_not_begun_can_be_asked(before: str) -> None:
    shape = shape_of(sink=SINK)
    memory, world = built(shape, budget=8)
    if before == "start":
        memory.start(*world.sink())
    stream = recalled(memory)
    context = stream.compact(anchored(world, SINK), stream.far_span())
    keys, _, _ = shown_to(context, 1, question(shape, 2, 0)[1])
    assert keys.shape[1] == SINK
    assert context.next_position == SINK
