"""Re-anchoring: what is in memory, shown at consecutive positions, and the attention that this gives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protokv.config import DurableConfig, MemoryConfig
from protokv.context import Anchoring, SlotContext
from protokv.memory import build_memory
from protokv.rotary import rotate, turn, unrotate
from tests.memory.streams import PlainRotary, World, feed, shape_of, small_config

ORIGIN = 2
ROTARY = PlainRotary(8)


def context_of(times: list[list[int]], near: list[int], *, empty: set[int] = frozenset()) -> SlotContext:
    """One layer, a head for each list of far times; `empty` names free far slots. Two slots of prompt prefix."""
    H, far = len(times), len(times[0])
    time = torch.tensor([[*range(ORIGIN), *row, *near] for row in times])[None]
    positions = time[..., None]
    g = torch.Generator().manual_seed(3)
    bare = torch.randn(1, H, time.shape[2], 8, generator=g)
    bias = torch.zeros(time.shape)
    bias[:, :, [ORIGIN + slot for slot in empty]] = -torch.inf
    keys = rotate(bare, *ROTARY(positions))
    return SlotContext(keys, bare, bias, slice(ORIGIN, ORIGIN + far), lambda: positions)


def compact(context: SlotContext) -> SlotContext:
    return context.compacted(Anchoring(ROTARY, ORIGIN), context.far_span())


def times_of(context: SlotContext) -> list[list[int]]:
    assert context.positions is not None
    return context.positions()[0, :, :, 0].tolist()


def test_far_times_stand_one_apart_before_the_window_newest_next_to_it() -> None:
    shown = compact(context_of([[400, 90, 400], [70, 90, 400]], [1000, 1001, 1003]))
    assert times_of(shown) == [[0, 1, 4, 3, 4, 5, 6, 8], [0, 1, 2, 3, 4, 5, 6, 8]]
    assert (shown.shift, shown.next_position) == (995, 9)


def test_a_far_copy_of_what_is_still_in_the_window_moves_with_the_window() -> None:
    shown = compact(context_of([[50, 1001]], [1000, 1001]))
    assert times_of(shown) == [[0, 1, 2, 4, 3, 4]]


def test_without_a_window_the_newest_time_is_the_last_position() -> None:
    shown = compact(context_of([[50, 10, 70]], []))
    assert times_of(shown) == [[0, 1, 3, 2, 4]]
    assert shown.next_position == 5


def test_free_slots_take_no_position() -> None:
    shown = compact(context_of([[50, 123, 70]], [99], empty={1}))
    assert [times_of(shown)[0][slot] for slot in (2, 4, 5)] == [2, 3, 4]


def test_nothing_moves_while_positions_are_consecutive() -> None:
    context = context_of([[2, 3, 4]], [5, 6])
    assert compact(context) is context


def test_keys_are_turned_to_the_positions_that_are_named() -> None:
    context = context_of([[400, 90, 35]], [1000, 1001])
    shown = compact(context)
    assert shown.positions is not None
    bare = unrotate(shown.keys, *ROTARY(shown.positions()))
    torch.testing.assert_close(bare, context.values, rtol=0, atol=1e-5)
    assert torch.equal(shown.keys[:, :, :ORIGIN], context.keys[:, :, :ORIGIN])


def test_only_moving_components_are_shifted() -> None:
    positions = torch.tensor([[50, 3, 4], [900, 2, 5]]).expand(1, 1, 2, 3)
    keys = torch.randn(1, 1, 2, 8, generator=torch.Generator().manual_seed(0))
    context = SlotContext(keys, keys, torch.zeros(1, 1, 2), slice(0, 1), lambda: positions)
    for moving, expected in (((0,), [[2, 3, 4], [3, 2, 5]]), ((0, 1, 2), [[2, -45, -44], [3, -895, -892]])):
        shown = context.compacted(Anchoring(ROTARY, ORIGIN, moving), context.far_span())
        assert shown.positions is not None
        assert shown.positions()[0, 0].tolist() == expected


def test_a_context_without_positions_says_so() -> None:
    keys = torch.zeros(1, 1, 2, 8)
    context = SlotContext(keys, keys, torch.zeros(1, 1, 2), slice(0, 1))
    with pytest.raises(ValueError, match="positions"):
        context.compacted(Anchoring(ROTARY, ORIGIN), 1)


@given(st.integers(0, 400_000), st.integers(0, 4000))
def test_turning_keys_from_far_positions_loses_nothing(here: int, there: int) -> None:
    bare = torch.randn(5, 8, generator=torch.Generator().manual_seed(here))
    one, other = (torch.full((5, 1), position) for position in (here, there))
    turned = turn(rotate(bare, *ROTARY(one)), one, other, ROTARY)
    torch.testing.assert_close(turned, rotate(bare, *ROTARY(other)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("components", [1, 3])
@pytest.mark.parametrize(
    "config",
    [
        small_config(29),
        small_config(29, anchor="average", residual=False),
        small_config(29, split=(0, 1)),
        DurableConfig(budget=29),
        MemoryConfig.of("sliding-window", budget=29),
    ],
    ids=["paper", "average", "far-only", "durable", "sliding-window"],
)
def test_a_stream_of_any_length_is_shown_within_the_budget_in_order(config: MemoryConfig, components: int) -> None:
    shape = shape_of(heads=2, components=components)
    world = World(shape, 1)
    memory = build_memory(config, shape, world.rotary)
    feed(memory, world, [3, 5, 1, 7, 2, 6] * 20)
    context = memory.context()
    assert isinstance(context, SlotContext)
    assert context.positions is not None
    shown = context.compacted(Anchoring(world.rotary, ORIGIN), context.far_span())
    assert shown.positions is not None
    live = context.bias > -torch.inf
    before, after = context.positions()[..., 0], shown.positions()[..., 0]
    assert int(after[live].max()) < config.budget + ORIGIN
    assert int(after[live].min()) == 0
    for old, new in zip(
        (b[a] for b, a in zip(before.flatten(0, 1), live.flatten(0, 1), strict=True)),
        (b[a] for b, a in zip(after.flatten(0, 1), live.flatten(0, 1), strict=True)),
        strict=True,
    ):
        # Strictly increasing in each other: no two times fall together and none change places.
        assert ((old[:, None] < old) == (new[:, None] < new)).all()
