"""The last frames read afresh: equal to the plain reading before evictions, bounded, saved, refused
when unsound.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import protokv
from protokv.backbones import load_backbone
from protokv.core.backbone import Backbone
from protokv.errors import ConfigError, StateCorrupt
from protokv.memories import MEMORIES, MemoryConfig
from protokv.state.describe import convert_state, describe_state
from protokv.stream.session import Session
from protokv.texts import Keywords
from tests.backbones.tiny import BUILDERS
from tests.conftest import random_frames, watched
from tests.core.streams import same
from tests.tolerance import check_logits, near_logits

SUPPORTED = [name for name, cls in MEMORIES.items() if not cls.memory.retrieves]
QUESTION = "what is it?"


def after(
    backbone: Backbone, n: int, name: str = "full", *, budget: int = 200, **settings: Any
) -> Session:
    return watched(
        backbone, MemoryConfig.of(name, budget=budget, **settings).for_step(budget), range(n)
    )


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "llava_onevision"])
def test_any_kind_of_positions_reads_its_steps_afresh(
    family: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = BUILDERS[family](tmp_path_factory.mktemp(family))
    backbone = load_backbone(str(folder), device="cpu", dtype="float32")
    plain, afresh = (after(backbone, 3, recent_frames=n * backbone.frames_per_step) for n in (0, 2))
    expected = plain.prefill(QUESTION)
    found = afresh.prefill(QUESTION)
    check_logits(plain, found, expected)
    protokv.save(afresh, folder / "state.safetensors")
    convert_state(folder / "state.safetensors", folder / "state.zarr")
    assert torch.equal(protokv.load(folder / "state.zarr", backbone).prefill(QUESTION), found)


@pytest.mark.parametrize("positions", ["stream", "compact"])
def test_the_last_frames_alone_and_afresh_are_the_plain_model_on_these_frames(
    tiny: Backbone, positions: str
) -> None:
    steps = 2
    settings: Keywords = {"last_steps": steps, "positions": positions}
    session = after(tiny, 6, "last-frames", **settings, recent_frames=steps * tiny.frames_per_step)
    # By hand: the prompt, the last steps, the question; compact, the first of the steps stands
    # right behind the prompt.
    ids = tiny.suffix_ids(QUESTION)
    prefix = len(tiny.prefix_ids)
    prelude = list(session.recent.steps)
    stands = torch.cat([positions for _, positions in prelude])
    if positions == "compact":
        stands = stands.clone()
        stands[:, list(tiny.moving)] -= int(stands[0, 0]) - prefix
    embedded = [
        tiny.embed_text(tiny.prefix_ids),
        *(tokens.embeddings for tokens, _ in prelude),
        tiny.embed_text(ids),
    ]
    places = [
        tiny.text_positions(0, prefix),
        stands,
        tiny.text_positions(int(stands.max()) + 1, len(ids)),
    ]
    with torch.inference_mode():
        hidden = tiny.forward(torch.cat(embedded), torch.cat(places), tiny.new_cache())
        expected = tiny.logits(hidden[-len(ids) :])
    allowed = near_logits(session, expected)
    torch.testing.assert_close(session.prefill(QUESTION), expected, **allowed)
    # And that is another reading than the keys that were made one frame at a time.
    one_by_one = after(tiny, 6, "last-frames", **settings).prefill(QUESTION)
    assert (one_by_one - expected).abs().max() > 100 * allowed["atol"]


@pytest.mark.parametrize("name", SUPPORTED)
def test_recent_steps_are_bounded_and_a_question_reads_them_once_before_its_text(
    tiny: Backbone, name: str
) -> None:
    session = after(tiny, 7, name, budget=24, recent_frames=5, positions="compact")
    tokens = sum(len(positions) for _, positions in list(session.recent.steps))
    assert len(list(session.recent.steps)) == 3
    assert session.ask(QUESTION).context_tokens <= len(tiny.prefix_ids) + 24 + tokens
    before = session.state_bytes
    for seed in range(7, 9):
        session.watch(random_frames(seed))
    assert before == session.state_bytes > session.memory.bytes_held or name in ("full", "dycoke")
    reading = session.read_question(QUESTION)
    held = len(tiny.prefix_ids) + reading.cache.context.visible_tokens() + reading.cache.length
    assert reading.next_position is not None
    assert reading.next_position <= held + 12
    assert torch.isfinite(reading.logits).all()
    # A window that holds them as single tokens reads no more than without.
    if name == "sliding-window":
        assert (
            session.ask(QUESTION).context_tokens
            == after(tiny, 9, name, budget=24).ask(QUESTION).context_tokens
        )


@pytest.mark.parametrize("cut", [0, 2])
def test_a_stream_continued_from_a_state_is_the_same_stream(
    tiny: Backbone, tmp_path: Path, cut: int
) -> None:
    whole, part = (after(tiny, n, "durable", budget=24, recent_frames=4) for n in (5, cut))
    protokv.save(part, tmp_path / "state.safetensors")
    counted = describe_state(tmp_path / "state.safetensors")["bytes"].get("recent", 0)
    assert counted == part.state_bytes - part.memory.bytes_held
    resumed = protokv.load(tmp_path / "state.safetensors", tiny)
    for seed in range(cut, 5):
        resumed.watch(random_frames(seed))
    assert same(whole.tensors(), resumed.tensors())
    assert torch.equal(whole.prefill(QUESTION), resumed.prefill(QUESTION))


@pytest.mark.parametrize(("place", "value"), [((0, 0), 1), ((0, 3), -1), ((1, 4), 10**9)])
def test_recent_steps_that_make_no_sense_are_refused(
    tiny: Backbone, place: tuple[int, int], value: int
) -> None:
    state = after(tiny, 4, "durable", budget=24, recent_frames=4).make_state()
    rows = state.tensors["recent.steps"].clone()
    rows[place] = value
    with pytest.raises(StateCorrupt, match="recent"):
        Session.restore(replace(state, tensors={**state.tensors, "recent.steps": rows}), tiny)


def test_memories_that_cannot_read_afresh_refuse_recent_frames(tiny: Backbone) -> None:
    for name in MEMORIES.keys() - set(SUPPORTED):
        with pytest.raises(ConfigError, match="recent_frames"):
            after(tiny, 1, name, recent_frames=4)
