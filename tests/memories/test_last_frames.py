"""A question sees the last N steps that fit, each encoded without the steps before it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protokv.core.backbone import Backbone
from protokv.core.build import build_memory
from protokv.core.context import SlotContext
from protokv.memories import LastFramesConfig, MemoryConfig, SlidingWindowConfig
from protokv.stream.session import Session
from tests.conftest import random_frames, watched
from tests.core.streams import World, shape_of
from tests.tolerance import check_logits

QUESTION = "what is the first star ?"


@given(
    st.integers(1, 30),
    st.integers(1, 6) | st.just(99),
    st.lists(st.integers(1, 9), min_size=1, max_size=20),
    st.integers(0, 99),
)
def test_the_last_whole_steps_that_fit_are_read_and_nothing_else(
    budget: int, last_steps: int, lengths: list[int], seed: int
) -> None:
    shape = shape_of(heads=2)
    world = World(shape, seed)
    # More steps than there are: a sliding window.
    config = (
        LastFramesConfig(budget=budget, last_steps=last_steps)
        if last_steps < len(lengths)
        else SlidingWindowConfig(budget=budget)
    )
    memory = build_memory(config, shape, world.rotary)
    memory.start(*world.sink())
    steps = [world.step(index, tokens) for index, tokens in enumerate(lengths)]
    held: list[list[int]] = []
    read: SlotContext
    for step in steps:
        memory.append(step)
        # The expected steps as lists.
        held = [*held, step.positions[:, 0].tolist()[-budget:]][-last_steps:]
        while sum(map(len, held)) > budget:
            held.pop(0)
        shown = memory.recall()
        assert isinstance(shown, SlotContext)
        read = shown
        live = read.bias[0, 0] > -torch.inf
        times = read.positions()[0, 0, live, 0].tolist()
        assert sorted(times[2:]) == [time for times in held for time in times]
        assert read.visible_tokens() == 2 + sum(map(len, held)) <= 2 + budget
    stream = torch.cat([step.keys for step in steps], 2)
    assert torch.equal(read.keys[:, :, live][:, :, 2:], stream[:, :, times[2:]])


@pytest.mark.parametrize("positions", ["stream", "compact"])
def test_an_answer_depends_on_the_last_steps_alone(tiny: Backbone, positions: str) -> None:
    pasts = [[0, 1, 2, 3, 20, 21, 22], [9, 8, 7, 6, 20, 21, 22]]
    config = MemoryConfig.of("last-frames", budget=400, last_steps=3, positions=positions)
    one, other = (watched(tiny, config, past).prefill(QUESTION) for past in pasts)
    assert torch.equal(one, other)
    changed = watched(tiny, config, [*pasts[0][:4], 19, 21, 22]).prefill(QUESTION)
    assert (one - changed).abs().max() > 1e-3


def test_one_step_at_compact_positions_is_the_plain_model_with_this_step_alone(
    tiny: Backbone,
) -> None:
    session = Session.start(tiny, LastFramesConfig(budget=400, last_steps=1, positions="compact"))
    for index, frame in enumerate([3, 1, 4, 1, 5]):
        # Half a second is one temporal position of this model, so steps follow each other without a
        # gap.
        session.watch(random_frames(frame), time_s=index / 2)
    alone = watched(tiny, MemoryConfig.of("full", budget=400), [5])
    expected = alone.prefill(QUESTION)
    check_logits(alone, session.prefill(QUESTION), expected)
