"""Re-anchoring: what is in memory, shown at consecutive positions, and the attention that this gives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protokv.attention import plain
from protokv.config import DurableConfig, MemoryConfig
from protokv.context import EMPTY, Anchoring, CompactContext, Context, Segment, SlotContext, turning
from protokv.context.compact import LATE
from protokv.context.turning import Angles, moving_pairs, turn_
from protokv.memory import build_memory
from protokv.rotary import rotate, turn, unrotate
from tests.memory.streams import PlainRotary, World, feed, shape_of, shown_to, small_config

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


def compact(context: SlotContext) -> Context:
    return context.compacted(Anchoring(ROTARY, ORIGIN), context.far_span())


def times_of(context: Context) -> list[list[int]]:
    return places_of(context)[0, :, :, 0].tolist()


def places_of(context: Context) -> torch.Tensor:
    assert isinstance(context, SlotContext | CompactContext)
    assert context.positions is not None
    return context.positions()


def literal(context: SlotContext, anchoring: Anchoring, *, span: int | None = None) -> tuple[SlotContext, int, int]:
    """Compact placement written out slot by slot, every key turned: the slots, the shift and the next position."""
    assert context.positions is not None
    places, live = context.positions().tolist(), (context.bias > -torch.inf).tolist()
    L, H, N = context.bias.shape
    heads = [(layer, head) for layer in range(L) for head in range(H)]
    near_slots, far_slots = range(context.far.stop, N), range(context.far.start, context.far.stop)
    behind = [
        places[a][b][slot][0]
        for slots in (near_slots, far_slots)
        for a, b in heads
        for slot in slots
        if live[a][b][slot]
    ]
    has_near = any(live[a][b][slot] for a, b in heads for slot in near_slots)
    near_times = [places[a][b][slot][0] for a, b in heads for slot in near_slots if live[a][b][slot]]
    near = min(near_times) if has_near else max(behind, default=-1) + 1
    older = {
        (a, b): sorted({places[a][b][s][0] for s in far_slots if live[a][b][s] and places[a][b][s][0] < near})
        for a, b in heads
    }
    distinct = max(map(len, older.values()), default=0)
    shift = near - anchoring.origin - (distinct if span is None else span)
    if shift <= 0:
        return context, 0, -1
    moved, last = context.positions().clone(), anchoring.origin - 1
    for a, b in heads:
        times = older[a, b]
        for slot in range(context.far.start, N):
            time = places[a][b][slot][0]
            is_older = slot in far_slots and live[a][b][slot] and time in times
            by = near - shift - len(times) + times.index(time) - time if is_older else -shift
            for component in anchoring.moving:
                moved[a, b, slot, component] += by
            if live[a][b][slot]:
                last = max(last, int(moved[a, b, slot].max()))
    seen = slice(context.far.start, None)
    keys = context.keys.clone()
    keys[:, :, seen] = turn(keys[:, :, seen], context.positions()[:, :, seen], moved[:, :, seen], anchoring.rotary)
    return SlotContext(keys, context.values, context.bias, context.far, lambda: moved), shift, last + 1


@st.composite
def contexts(draw: st.DrawFn) -> tuple[SlotContext, tuple[int, ...]]:
    """Any times of far slots (copies of near ones too), any slots free, one position component or three."""
    H, F, W = draw(st.integers(1, 3)), draw(st.integers(0, 9)), draw(st.integers(0, 5))
    P, moving = draw(st.sampled_from([(1, (0,)), (3, (0,)), (3, (0, 1, 2))]))
    # Late in the stream near keys are turned too.
    start = draw(st.integers(ORIGIN, 300)) + draw(st.sampled_from([0, 0, LATE]))
    gap = draw(st.integers(1, 3))
    near = [start + gap * index for index in range(W)]
    times = st.integers(max(ORIGIN, start - 400), max(near, default=start))
    g = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    N = ORIGIN + F + W
    positions = torch.randint(ORIGIN, ORIGIN + 5, (2, H, N, P), generator=g)
    rows = [[draw(st.lists(times, min_size=F, max_size=F)) for _ in range(H)] for _ in range(2)]
    for layer in range(2):
        for head in range(H):
            positions[layer, head, :, 0] = torch.tensor([*range(ORIGIN), *rows[layer][head], *near])
    bare, values = (torch.randn(2, H, N, 8, generator=g) for _ in range(2))
    bias = torch.rand(2, H, N, generator=g)
    bias[..., ORIGIN : ORIGIN + F][torch.rand(2, H, F, generator=g) < 0.3] = -torch.inf
    bias[..., ORIGIN + F :].masked_fill_(torch.rand(W, generator=g) < 0.3, -torch.inf)
    keys = rotate(bare, *ROTARY(positions))
    return SlotContext(keys, values, bias, slice(ORIGIN, ORIGIN + F), lambda: positions), moving


@given(contexts(), st.integers(0, 4))
def test_attention_over_turned_queries_is_that_over_keys_turned_one_by_one(
    case: tuple[SlotContext, tuple[int, ...]], more: int
) -> None:
    context, moving = case
    anchoring = Anchoring(ROTARY, ORIGIN, moving)
    span = context.far_span() + more
    expected, shift, after = literal(context, anchoring, span=span)
    shown = context.compacted(anchoring, span)
    assert shown.shift == shift
    if not shift:
        assert shown is context
        return
    assert shown.next_position == after
    live = (context.bias > -torch.inf)[..., None]
    assert torch.equal(places_of(shown) * live, places_of(expected) * live)
    g = torch.Generator().manual_seed(1)
    H = context.keys.shape[1]
    query, tail = torch.randn(2 * H, 3, 8, generator=g), (torch.randn(H, 3, 8, generator=g),) * 2
    for layer in range(2):
        one, other = (plain.attend(query, each.at(layer, query), tail, 0.3) for each in (shown, expected))
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@given(contexts())
def test_a_compact_context_hides_its_far_slots(case: tuple[SlotContext, tuple[int, ...]]) -> None:
    context, moving = case
    anchoring = Anchoring(ROTARY, ORIGIN, moving)
    shown = context.compacted(anchoring, context.far_span()).without_far()
    expected, _, _ = literal(context, anchoring)
    g = torch.Generator().manual_seed(1)
    H = context.keys.shape[1]
    query, tail = torch.randn(H, 2, 8, generator=g), (torch.randn(H, 2, 8, generator=g),) * 2
    far = expected.bias.clone()
    far[..., context.far] = EMPTY
    hidden = Segment(expected.keys[1], expected.values[1], far[1].clamp(min=EMPTY))
    one = plain.attend(query, shown.at(1, query), tail, 0.3)
    torch.testing.assert_close(one, plain.attend(query, [hidden], tail, 0.3), rtol=1e-4, atol=1e-4)


def test_far_keys_of_a_layer_are_turned_once_for_an_answer() -> None:
    shown = compact(context_of([[400, 90, 35]], [1000, 1001]))
    query = torch.ones(1, 1, 8)
    assert shown.at(0, query)[0] is shown.at(0, query)[0]


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
    keys, _, _ = shown_to(shown, 0, torch.ones(1, 1, 8))
    bare = unrotate(keys, *ROTARY(places_of(shown)[0]))
    torch.testing.assert_close(bare, context.values[0], rtol=0, atol=1e-4)
    assert torch.equal(keys[:, :ORIGIN], context.keys[0, :, :ORIGIN])


def test_only_moving_components_are_shifted() -> None:
    positions = torch.tensor([[50, 3, 4], [900, 2, 5]]).expand(1, 1, 2, 3)
    keys = torch.randn(1, 1, 2, 8, generator=torch.Generator().manual_seed(0))
    context = SlotContext(keys, keys, torch.zeros(1, 1, 2), slice(0, 1), lambda: positions)
    for moving, expected in (((0,), [[2, 3, 4], [3, 2, 5]]), ((0, 1, 2), [[2, -45, -44], [3, -895, -892]])):
        shown = context.compacted(Anchoring(ROTARY, ORIGIN, moving), context.far_span())
        assert places_of(shown)[0, 0].tolist() == expected


def test_a_context_without_positions_says_so() -> None:
    keys = torch.zeros(1, 1, 2, 8)
    context = SlotContext(keys, keys, torch.zeros(1, 1, 2), slice(0, 1))
    with pytest.raises(ValueError, match="positions"):
        context.compacted(Anchoring(ROTARY, ORIGIN), 1)


@pytest.mark.parametrize("rows", [7, 4096])
def test_angles_looked_up_in_parts_turn_keys_as_their_own_angles_do(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turning, "_ROWS", rows)
    g = torch.Generator().manual_seed(rows)
    keys = torch.randn(2, 3, 11, 8, generator=g)
    index, other = torch.randint(0, 5, (2, 2, 3, 11), generator=g)
    positions, before = torch.tensor([[3], [-2], [0], [90], [7]]), torch.tensor([[1], [50], [4], [6], [0]])
    by, back = (Angles.of(ROTARY, *given, 4) for given in ((positions, index), (before, other)))
    for layer in range(2):
        moved, turned = keys[layer].clone(), keys[layer].clone()
        turn_(moved, layer, by)
        torch.testing.assert_close(moved, rotate(keys[layer], *ROTARY(positions[index[layer]])))
        turn_(turned, layer, by, back)
        expected = turn(keys[layer], before[other[layer]], positions[index[layer]], ROTARY)
        torch.testing.assert_close(turned, expected, rtol=1e-5, atol=1e-5)


def test_only_the_pairs_that_move_are_turned() -> None:
    time, every = torch.tensor([1, 0, 0]), torch.tensor([1, 1, 1])
    # Of 4 pairs the frequencies are dealt out to 3 components in turn.
    assert moving_pairs(PlainRotary(8), time, (0,), 8) == 4
    assert moving_pairs(PlainRotary(6), time, (0,), 6) == 1
    assert moving_pairs(PlainRotary(6), every, (0, 1, 2), 6) == 3


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
    live = context.bias > -torch.inf
    before, after = context.positions()[..., 0], places_of(shown)[..., 0]
    assert int(after[live].max()) < config.budget + ORIGIN
    assert int(after[live].min()) == 0
    for old, new in zip(
        (b[a] for b, a in zip(before.flatten(0, 1), live.flatten(0, 1), strict=True)),
        (b[a] for b, a in zip(after.flatten(0, 1), live.flatten(0, 1), strict=True)),
        strict=True,
    ):
        # Strictly increasing in each other: no two times fall together and none change places.
        assert ((old[:, None] < old) == (new[:, None] < new)).all()
