"""What counts as new, and what the newest tokens get where everything is."""

import pytest
import torch
from torch import Tensor

from protokv.core.step import StepKV
from protokv.errors import StateCorrupt
from protokv.memories.durable.memory import DurableMemory
from protokv.memories.durable.novelty import find_recurring_tokens
from tests.core.streams import World, copy_of, shape_of, small_durable


def watched(steps: list[Tensor], budget: int = 60) -> DurableMemory:
    """A memory that has seen steps of values `[B, T, D]`."""
    shape = shape_of(layers=1, heads=len(steps[0]), size=steps[0].shape[2])
    world = World(shape, 0)
    memory = DurableMemory(small_durable(budget=budget), shape, world.rotary)
    memory.start(*world.sink())
    for index, values in enumerate(steps):
        T = values.shape[1]
        places = torch.arange(T)[:, None] + index * T
        memory.append(StepKV(values[None], values[None], places, torch.zeros(T, 2), index))
    return memory


def test_a_token_comes_again_where_the_next_step_has_its_like_wherever_it_stands() -> None:
    step = torch.randn(3, 31, 65, generator=torch.Generator().manual_seed(0))
    moved = step.roll(5, dims=1) + 0.1
    assert find_recurring_tokens(step, moved).all()
    assert not find_recurring_tokens(step, -step).any()
    # A window that holds the end of a step alone tells the same of it.
    assert torch.equal(
        find_recurring_tokens(step[:, 20:], moved), find_recurring_tokens(step, moved)[:, 20:]
    )
    # One colour: all tokens are alike, and far from 0.
    flat = torch.full((2, 9, 8), 3.3)
    assert find_recurring_tokens(flat, flat).all()


def test_where_nothing_comes_again_the_newest_tokens_stay_exact_and_elsewhere_repeats_merge() -> (
    None
):
    draw = torch.Generator().manual_seed(1)
    new = torch.randn(60, 1, 8, 8, generator=draw)
    still = torch.randn(1, 1, 8, 8, generator=draw)
    steps = [torch.cat((one, still[0] + 0.01 * one)) for one in new]
    state = watched(steps).tensors()
    exact = (state["bank.mass"] == 1) & (state["bank.last_step"] >= 55)
    assert exact[0, 0].sum() >= 20 > exact[0, 1].sum()


@pytest.mark.parametrize(("name", "count"), [("seen", 0), ("repeated", -1), ("repeated", 10**6)])
def test_counts_that_no_stream_leaves_are_refused(name: str, count: int) -> None:
    memory = watched(list(torch.randn(3, 2, 7, 8)))
    state = copy_of(memory)
    state[f"novelty.{name}"].fill_(count)
    with pytest.raises(StateCorrupt, match="novelty"):
        memory.load(state)
