"""`NearWindow`: whole steps leave in order, and the window is the context's own storage."""

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from protokv.core.near import NearWindow
from protokv.core.slots import KVSlots
from tests.core.streams import World, shape_of

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=25)


@given(st.integers(0, 11), LENGTHS)
def test_every_token_is_in_the_window_or_has_left_it_once_in_order(
    window: int, lengths: list[int]
) -> None:
    shape = shape_of(heads=2)
    world = World(shape, seed=window)
    slots = KVSlots(shape, far=0, near=window)
    near = NearWindow(slots, 1)
    seen = []
    gone = []
    held: list[list[int]] = []
    for index, tokens in enumerate(lengths):
        step = replace(world.step(index, tokens), usable=torch.ones(tokens, dtype=torch.bool))
        # What is expected, written as lists.
        while held and sum(map(len, held)) + tokens > window:
            gone += held.pop(0)
        names = step.positions[:, 0].tolist()
        surplus = max(0, tokens - window)
        gone += names[:surplus]
        if names[surplus:]:
            held.append(names[surplus:])
        plan = near.plan(index, tokens)
        near.begin(plan.key, torch.tensor(plan.numbers))
        left = near.leaving(step)
        near.write(step)
        seen.append((left.positions[:, 0].tolist(), left.keys, step.keys))
        assert len(near) == sum(map(len, held)) <= window
        assert near.newest().positions[:, 0].tolist() == (held[-1] if held else [])
    assert [name for names, _, _ in seen for name in names] == gone
    stream = torch.cat([keys for _, _, keys in seen], 2)
    assert torch.equal(torch.cat([keys for _, keys, _ in seen], 2), stream[:, :, gone])
    shown = slots.bias[0, 0] == 0
    order = near.positions[shown[shape.sink_tokens :], 0]
    assert sorted(order.tolist()) == [name for names in held for name in names]
    assert torch.equal(slots.keys[:, :, shown], stream[:, :, order])
