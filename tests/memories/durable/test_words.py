"""Words merge with words alone, in a constant number of slots; pictures are as without them."""

from collections import Counter
from dataclasses import replace
from unittest.mock import patch

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from protokv.core.backbone import Backbone
from protokv.core.context import PositionFacts
from protokv.core.rotary import PreciseRotary
from protokv.core.step import StepKV
from protokv.memories import DurableConfig, MemoryConfig
from protokv.memories.durable import repeats
from protokv.memories.durable.memory import DurableMemory
from protokv.stream.session import Session
from protokv.words.transcript import Transcript
from tests.conftest import random_frames
from tests.core.streams import World, copy_of, same, shape_of
from tests.tolerance import check_logits

QUESTION = "what is the first star ?"


def pictures_of(step: StepKV) -> StepKV:
    return step.tokens(slice(0, len(step.positions) - step.words))


def rows_of(memory: DurableMemory, layer: int) -> Tensor:
    """Keys, values and bias of each slot, `[H, N, 2 D + 1]`."""
    (segment,) = memory.context().at(layer, torch.zeros(2, 1, 8))
    return torch.cat((segment.keys, segment.values, segment.bias[:, :, None]), 2)


@given(
    seed=st.integers(0, 99),
    share=st.sampled_from([0.1, 0.25, 0.6]),
    spoken=st.lists(st.integers(0, 14) | st.just(2), min_size=1, max_size=14),
)
# What stays in view enters the bank once, and words do not stay.
@patch.object(repeats, "DEEP_MODEL_LAYERS", 1)
def test_words_are_held_as_a_memory_of_words_alone_would_and_pictures_as_without_words(
    seed: int, share: float, spoken: list[int]
) -> None:
    shape = shape_of(heads=2)
    world = World(shape, seed, still=0.7)
    config = DurableConfig(budget=40, words=True, words_share=share)
    of_words = config.of_words()
    assert of_words is not None
    without = replace(config, words=False, budget=40 - of_words.budget)
    memory, bare, lone = (
        DurableMemory(one, shape, world.rotary) for one in (config, without, of_words)
    )
    sink = world.sink()
    for one in (memory, bare, lone):
        one.start(*sink)
    slots = rows_of(memory, 0).shape[1]
    said = 0
    for index, words in enumerate(spoken):
        step = replace(world.step(index, 5 + words), words=words)
        memory.append(step)
        bare.append(pictures_of(step))
        if words:
            lone.append(replace(step.tokens(slice(5, None)), step=said))
            said += 1
        if index == len(spoken) // 2:
            saved = copy_of(memory)
            memory = DurableMemory(config, shape, world.rotary)
            memory.load(saved)
    own = memory.tensors()
    apart = {
        f"words.{name}": tensor for name, tensor in lone.tensors().items() if name[:5] != "sink."
    }
    assert same(own, {**bare.tensors(), **apart, "words.seen": torch.tensor([sum(spoken)])})
    for layer in range(shape.layers):
        whole, pictures, alone = (rows_of(one, layer) for one in (memory, bare, lone))
        assert whole.shape[1] == slots
        both = torch.cat((pictures, alone[:, shape.sink_tokens :]), 1)
        for shown, expected in zip(whole, both, strict=True):
            found, wanted = (
                torch.unique(rows, dim=0, return_counts=True) for rows in (shown, expected)
            )
            assert all(map(torch.equal, found, wanted))


def test_where_all_that_is_said_is_new_whole_cues_from_all_of_the_stream_stay() -> None:
    shape = shape_of(layers=1, size=16)
    world = World(shape, 3, things=100_000, noise=0.0)
    config = DurableConfig(budget=200, words=True).of_words()
    assert config is not None
    memory = DurableMemory(config, shape, world.rotary)
    memory.start(*world.sink())
    for cue in range(100):
        memory.append(world.step(cue, 4))
    held = memory.tensors()
    for mass, steps in zip(
        held["bank.mass"].flatten(0, 1), held["bank.last_step"].flatten(0, 1), strict=True
    ):
        exact = Counter(steps[mass == 1].tolist())
        assert exact[64] + exact[96] >= 7


def test_compact_positions_take_words_for_what_they_are_old() -> None:
    shape = shape_of(heads=2)
    world = World(shape, 1)
    memory = DurableMemory(DurableConfig(budget=40, words=True), shape, world.rotary)
    memory.start(*world.sink())
    for index in range(30):
        memory.append(replace(world.step(index, 7), words=2))
    shown = memory.context().compact(
        PositionFacts(PreciseRotary(world.rotary, 1), shape.sink_tokens, world.time + 9)
    )
    segments = shown.at(0, torch.zeros(2, 1, 8))
    assert [segment.keys.shape[1] for segment in segments] == [shape.sink_tokens + 22 + 10, 8]
    assert shown.next_position is not None
    assert int(shown.next_position) <= shape.sink_tokens + 41


def test_until_the_first_eviction_words_apart_give_the_logits_of_the_whole_stream(
    tiny: Backbone,
) -> None:
    sessions = [
        Session.start(tiny, config, attachments=[Transcript()])
        for config in (
            DurableConfig(budget=400, words=True, step_tokens=400),
            MemoryConfig.of("full"),
        )
    ]
    for step in range(6):
        for session in sessions:
            session.watch(random_frames(step), words=["two three"] if step % 2 else [])
    apart, whole = (session.prefill(QUESTION) for session in sessions)
    check_logits(sessions[1], apart, whole)


def test_a_word_that_is_not_finite_is_hidden_and_counted_apart_from_pictures() -> None:
    shape = shape_of()
    world = World(shape, 1)
    memory = DurableMemory(DurableConfig(budget=40, words=True), shape, world.rotary)
    memory.start(*world.sink())
    step = replace(world.step(0, 8), words=3)
    step.keys[0, 0, 6, 0] = torch.nan
    memory.append(step)
    assert memory.context().visible_tokens() == shape.sink_tokens + 7
    assert memory.report()["tokens_dropped"] == 1
    held = memory.tensors()
    assert [
        int(held[name]) for name in ("sanitize.dropped", "words.sanitize.dropped", "words.seen")
    ] == [0, 1, 3]
