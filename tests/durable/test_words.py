"""Words are held whole and exact, apart from the bank, in a constant number of slots; pictures are as without them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from protokv.backbones.base import Backbone
from protokv.config import DurableConfig, MemoryConfig
from protokv.core.context import EMPTY
from protokv.core.session import Session
from protokv.core.step import StepKV
from protokv.durable.memory import Durable
from protokv.errors import StateCorrupt
from protokv.extras.compact import Anchoring, compacted
from protokv.extras.precise_rotary import PreciseRotary
from tests.conftest import random_frames
from tests.core.streams import World, copy_of, same, shape_of
from tests.tolerance import near_logits

QUESTION = "what is the first star ?"


def literal(said: list[tuple[int, Tensor]], room: int, keep: str) -> list[Tensor]:
    """Return the keys of the cues that stay, oldest first, one cue at a time."""
    held: list[tuple[int, Tensor]] = []
    for step, keys in said:
        keys = keys[:, :, :room]
        while sum(one.shape[2] for _, one in held) + keys.shape[2] > room:
            gone = 0
            if keep == "spread" and len(held) > 1:
                times = [-1] + [time for time, _ in held]
                gaps = [times[i + 2] - times[i] for i in range(len(held) - 1)]
                gone = gaps.index(min(gaps))
            del held[gone]
        held.append((step, keys))
    return [keys for _, keys in held]


def parted(step: StepKV, words: int) -> StepKV:
    return step.tokens(slice(0, len(step.positions) - words))


@given(
    seed=st.integers(0, 99),
    keep=st.sampled_from(["newest", "spread"]),
    bits=st.sampled_from([8, 32]),
    spoken=st.lists(st.integers(0, 14), min_size=1, max_size=14),
)
def test_whole_cues_stay_by_the_rule_and_pictures_are_as_without_words(
    seed: int, keep: str, bits: int, spoken: list[int]
) -> None:
    config = DurableConfig(budget=40, words=True, words_keep=keep, center_bits=bits)  # type: ignore[arg-type]
    shape = shape_of(heads=2)
    world = World(shape, seed)
    memory = Durable(config, shape, world.rotary)
    bare = Durable(DurableConfig(budget=30, center_bits=bits), shape, world.rotary)  # type: ignore[arg-type]
    sink = world.sink()
    memory.start(*sink)
    bare.start(*sink)
    said = []
    slots = memory.context().at(0, torch.zeros(2, 1, 8))[0].keys.shape
    for index, words in enumerate(spoken):
        step = replace(world.step(index, 5 + words), words=words)
        memory.append(step)
        bare.append(parted(step, words))
        if words:
            said.append((index, step.keys[:, :, -words:]))
        if index == len(spoken) // 2:
            saved, memory = copy_of(memory), Durable(config, shape, world.rotary)
            memory.load(saved)
    own = memory.tensors()
    assert {name: tensor for name, tensor in own.items() if name[:6] != "words."}.keys() == bare.tensors().keys()
    assert same({name: own[name] for name in bare.tensors()}, bare.tensors())
    expected = torch.cat([sink[0][:, :, :0], *literal(said, 10, keep)], 2)
    used = own["words.step"] >= 0
    rank = own["words.step"][used].argsort(stable=True)
    assert torch.equal(own["words.keys"][:, :, used][:, :, rank], expected)
    for layer in range(shape.layers):
        (segment,) = memory.context().at(layer, torch.zeros(2, 1, 8))
        assert segment.keys.shape == slots
        shown = segment.keys[:, (segment.bias == 0).all(0)]
        assert all((shown == one[:, None]).all(-1).any(1).all() for one in expected[layer].unbind(1))
        assert int((segment.bias > EMPTY).sum(1).max()) <= 40 + shape.sink_tokens


@pytest.mark.parametrize("bits", [8, 32])
def test_compact_positions_take_words_for_what_they_are_old(bits: int) -> None:
    shape = shape_of(heads=2)
    world = World(shape, 1)
    memory = Durable(DurableConfig(budget=40, words=True, center_bits=bits), shape, world.rotary)  # type: ignore[arg-type]
    memory.start(*world.sink())
    for index in range(30):
        memory.append(replace(world.step(index, 7), words=2))
    shown = compacted(memory.context(), Anchoring(PreciseRotary(world.rotary, 1), shape.sink_tokens, world.time + 9))
    segments = shown.at(0, torch.zeros(2, 1, 8))
    assert [segment.keys.shape[1] for segment in segments] == [shape.sink_tokens + 22 + 10, 8]
    assert int(shown.next_position) <= shape.sink_tokens + 41  # type: ignore[attr-defined]


def test_until_the_first_eviction_words_apart_give_the_logits_of_the_whole_stream(tiny: Backbone) -> None:
    sessions = [
        Session.start(tiny, config) for config in (DurableConfig(budget=400, words=True), MemoryConfig.of("full"))
    ]
    for step in range(6):
        for session in sessions:
            session.watch(random_frames(step), words=["two three"] if step % 2 else [])
    apart, whole = (session.prefill(QUESTION) for session in sessions)
    torch.testing.assert_close(apart, whole, **near_logits(sessions[1], whole))


def test_a_config_without_words_says_nothing_of_them() -> None:
    assert not [name for name in DurableConfig().to_dict() if name.startswith("words")]
    spoken = DurableConfig().with_words(True)
    assert MemoryConfig.from_dict(spoken.to_dict()) == spoken
    assert spoken.changes() == DurableConfig().changes() == {}
    assert spoken.with_fields({"words_share": 0.5}).changes() == {"words_share": 0.5}


def test_a_word_that_is_not_finite_is_hidden_and_counted_apart_from_pictures() -> None:
    shape = shape_of()
    world = World(shape, 1)
    memory = Durable(DurableConfig(budget=40, words=True), shape, world.rotary)
    memory.start(*world.sink())
    step = replace(world.step(0, 8), words=3)
    step.keys[0, 0, 6, 0] = torch.nan
    memory.append(step)
    assert memory.context().visible_tokens() == shape.sink_tokens + 7
    assert memory.report()["tokens_dropped"] == 1
    held = memory.tensors()
    assert [int(held[name]) for name in ("sanitize.dropped", "words.dropped", "words.seen")] == [0, 1, 3]
    for name, wrong in (("seen", 2), ("dropped", 4)):
        with pytest.raises(StateCorrupt, match=r"words\.seen"):
            memory.load({**copy_of(memory), f"words.{name}": torch.tensor([wrong])})
