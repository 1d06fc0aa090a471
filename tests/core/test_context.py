"""Re-anchoring: what is in memory, shown at consecutive positions, and the attention that this
gives.
"""

import math
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protokv.core import rotary
from protokv.core.context import CachedContext, CompactContext, Context, PositionFacts, SlotContext
from protokv.core.rotary import (
    PreciseRotary,
    rerotate,
    rotate,
)
from tests.core.streams import PlainRotary
from tests.oracles import attention as plain
from tests.tolerance import Tolerance, check_near, near, tolerance

ORIGIN = 2
ROTARY = PlainRotary(8)
# By the number of position components.
PRECISE = {components: PreciseRotary(ROTARY, components) for components in (1, 3)}
LATE = 2**31
# Of two angles the cosines and sines are rounded, the products of these, and those with a pair of
# numbers of a key.
TURNED = 6


def shown_positions(context: Context) -> torch.Tensor:
    slots = context.slots if isinstance(context, CompactContext) else context
    assert isinstance(slots, SlotContext)
    there = slots.positions().clone()
    if isinstance(context, CompactContext):
        for component in context.anchoring.moving:
            there[..., slots.far, component] += context.moves
            there[..., slots.far.stop :, component] -= context.shift
    return there


def literal(
    context: SlotContext, anchoring: PositionFacts, span: int
) -> tuple[SlotContext, int, int | torch.Tensor]:
    """Compact placement written out slot by slot, every key turned: the slots, the shift and the
    next position.
    """
    places = context.positions().tolist()
    live = (context.bias > -torch.inf).tolist()
    L, H, N = context.bias.shape
    heads = [(layer, head) for layer in range(L) for head in range(H)]
    near_slots = range(context.far.stop, N)
    far_slots = range(context.far.start, context.far.stop)
    near_times, far_times = (
        [places[a][b][slot][0] for a, b in heads for slot in slots if live[a][b][slot]]
        for slots in (near_slots, far_slots)
    )
    near = min(near_times) if near_times else max(far_times, default=-1) + 1
    older = {
        (a, b): sorted(
            {places[a][b][s][0] for s in far_slots if live[a][b][s] and places[a][b][s][0] < near}
        )
        for a, b in heads
    }
    shift = near - anchoring.origin - span
    if shift <= 0:
        return context, 0, anchoring.end
    moved = context.positions().clone()
    last = anchoring.origin - 1
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
    keys[:, :, seen] = rerotate(
        keys[:, :, seen], context.positions()[:, :, seen], moved[:, :, seen], anchoring.rotary
    )
    return (
        SlotContext(keys, context.values, context.bias, context.far, lambda: moved),
        shift,
        last + 1,
    )


@st.composite
def contexts(draw: st.DrawFn) -> tuple[SlotContext, PositionFacts]:
    """Any times of far slots (copies of near ones too), any slots free, one position component or
    three.
    """
    H = draw(st.integers(1, 3))
    F = draw(st.integers(0, 9))
    W = draw(st.integers(0, 5))
    P, moving = draw(st.sampled_from([(1, (0,)), (3, (0,)), (3, (0, 1, 2))]))
    start = draw(st.integers(ORIGIN, 300)) + draw(st.sampled_from([0, 0, 2**16, LATE]))
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
    keys = rotate(bare, PRECISE[P](positions))
    context = SlotContext(keys, values, bias, slice(ORIGIN, ORIGIN + F), lambda: positions)
    return context, PositionFacts(
        PRECISE[P], ORIGIN, int(positions.max()) + draw(st.integers(1, 9)), moving
    )


def attended(
    expected: torch.Tensor, context: SlotContext, tail: tuple[torch.Tensor, torch.Tensor]
) -> Tolerance:
    """The tolerance for attention: keys are turned, products go over a head, and values are
    weighed.
    """
    terms = TURNED + 8 + context.values.shape[2] + tail[1].shape[1]
    return near(expected, terms, max(float(context.values.abs().max()), float(tail[1].abs().max())))


@pytest.mark.parametrize("rows", [7, 4096])
@given(case=contexts(), more=st.integers(0, 4))
def test_turned_queries_attend_as_over_keys_turned_one_by_one(
    rows: int, case: tuple[SlotContext, PositionFacts], more: int
) -> None:
    with patch.object(rotary, "_ROWS", rows):
        check_compact(case, more)


def check_compact(case: tuple[SlotContext, PositionFacts], more: int) -> None:
    context, anchoring = case
    span = int(context.far_span()) + more
    expected, shift, after = literal(context, anchoring, span)
    shown = context.compact(anchoring, span)
    assert (shown.shift, shown.next_position) == (shift, after)
    held = CachedContext(shown)
    live = (context.bias > -torch.inf)[..., None]
    assert torch.equal(shown_positions(shown) * live, shown_positions(expected) * live)
    g = torch.Generator().manual_seed(1)
    H = context.keys.shape[1]
    query = torch.randn(2 * H, 3, 8, generator=g)
    tail = (torch.randn(H, 3, 8, generator=g),) * 2
    for layer in range(2):
        one, other = (
            plain.attend(query, each.at(layer, query), tail, 0.3) for each in (shown, expected)
        )
        torch.testing.assert_close(one, other, **attended(other, context, tail))
        # Far keys are turned once for all of an answer.
        assert held.at(layer, query) is held.at(layer, query)


def oracle(precise: PreciseRotary, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of each pair in float64, of integers of any size."""
    (owner, rate), *_ = precise._made.values()
    parts = [
        [position[own] * by % 2**32 for own, by in zip(owner.tolist(), rate.tolist(), strict=True)]
        for position in positions.tolist()
    ]
    angle = torch.tensor(parts, dtype=torch.float64) * (2 * math.pi / 2**32)
    return angle.cos(), angle.sin()


@pytest.mark.parametrize("size", [2, 8, 34, 128])
@given(st.integers(0, 2**33 - 1), st.integers(1, 3))
def test_precise_angles_are_right_at_any_position(
    size: int, position: int, components: int
) -> None:
    precise = PreciseRotary(PlainRotary(size), components)
    places = torch.tensor([[position // (1 + component) for component in range(components)]])
    for mine, expected in zip(precise.of_pairs(places), oracle(precise, places), strict=True):
        # The part of a turn is rounded, and is pi at the most, and so is its cosine.
        torch.testing.assert_close(
            mine.double(), expected, rtol=0, atol=tolerance(mine.dtype, 2, math.pi)
        )


@pytest.mark.parametrize("size", [2, 8, 34, 128])
@given(st.integers(0, 2**15), st.integers(1, 3))
def test_precise_angles_are_the_model_s_at_small_positions(
    size: int, position: int, components: int
) -> None:
    places = torch.tensor([[position // (1 + component) for component in range(components)]])
    mine = PreciseRotary(PlainRotary(size), components)(places)
    theirs = PlainRotary(size)(places)
    # The model rounds its rate and its angle to float32; no pair turns by more than one a position.
    for one, other in zip(mine, theirs, strict=True):
        check_near(one, other, 2, position + math.pi)
