"""The last frames read afresh: equal to the plain reading before evictions, bounded, saved, refused when unsound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import protokv
from protokv.backbones import load_backbone
from protokv.core.attention import LocalKV
from protokv.core.backbone import Backbone
from protokv.core.context import EmptyContext
from protokv.core.recent import WithRecent
from protokv.core.session import Session
from protokv.errors import ConfigError, StateCorrupt
from protokv.memories import CONFIGS, MemoryConfig
from protokv.state import checkpoint
from tests.backbones.tiny import BUILDERS
from tests.conftest import random_frames
from tests.tolerance import near_logits

SUPPORTED = [name for name, cls in CONFIGS.items() if cls.memory.hides_recent]
QUESTION = "what is it?"


def watched(backbone: Backbone, n: int, name: str = "full", *, budget: int = 200, **settings: object) -> Session:
    session = Session.start(backbone, MemoryConfig.of(name, budget=budget, **settings))
    for seed in range(n):
        session.watch(random_frames(seed, n_frames=backbone.frames_per_step))
    return session


@pytest.mark.parametrize("name", [name for name in SUPPORTED if name not in ("last-frames", "dycoke")])
def test_before_evictions_reading_afresh_equals_reading_the_keys(tiny: Backbone, name: str) -> None:
    session = watched(tiny, 4, name, budget=400)
    plain, afresh = (s.prefill(QUESTION) for s in (session, watched(tiny, 4, name, budget=400, recent_frames=4)))
    torch.testing.assert_close(afresh, plain, **near_logits(session, plain))


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "llava_onevision"])
def test_every_kind_of_positions_reads_its_own_steps_afresh(
    family: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = BUILDERS[family](tmp_path_factory.mktemp(family))
    backbone = load_backbone(str(folder), device="cpu", dtype="float32")
    frames = 2 * backbone.frames_per_step
    sessions = [watched(backbone, 3, recent_frames=n) for n in (0, frames)]
    plain, afresh = (session.prefill(QUESTION) for session in sessions)
    torch.testing.assert_close(afresh, plain, **near_logits(sessions[0], plain))


@pytest.mark.parametrize("positions", ["stream", "compact"])
def test_the_last_frames_alone_and_afresh_are_the_plain_model_on_these_frames(tiny: Backbone, positions: str) -> None:
    steps = 2
    settings = {"last_steps": steps, "positions": positions}
    session = watched(tiny, 6, "last-frames", **settings, recent_frames=steps * tiny.frames_per_step)
    # By hand: the prompt, the last steps, the question; compact, the first of the steps stands right behind the prompt.
    ids, prefix = tiny.suffix_ids(QUESTION), len(tiny.prefix_ids)
    assert isinstance(session.memory, WithRecent)
    prelude = session.memory.prelude()
    stands = torch.cat([positions for _, positions in prelude])
    if positions == "compact":
        stands = stands.clone()
        stands[:, list(tiny.moving)] -= int(stands[0, 0]) - prefix
    embedded = [tiny.embed_text(tiny.prefix_ids), *(tokens.embeddings for tokens, _ in prelude), tiny.embed_text(ids)]
    places = [tiny.text_positions(0, prefix), stands, tiny.text_positions(int(stands.max()) + 1, len(ids))]
    tail: LocalKV = tiny.new_local_kv(sum(map(len, embedded)))
    with torch.inference_mode():
        hidden = tiny.forward(torch.cat(embedded), torch.cat(places), EmptyContext(), tail)
        expected = tiny.logits(hidden[-len(ids) :])
    allowed = near_logits(session, expected)
    torch.testing.assert_close(session.prefill(QUESTION), expected, **allowed)
    # And that is another reading than the keys that were made one frame at a time.
    one_by_one = watched(tiny, 6, "last-frames", **settings).prefill(QUESTION)
    assert (one_by_one - expected).abs().max() > 100 * allowed["atol"]


@pytest.mark.parametrize("name", SUPPORTED)
def test_a_question_at_compact_positions_stands_right_after_the_recent_steps(tiny: Backbone, name: str) -> None:
    session = watched(tiny, 9, name, budget=24, recent_frames=4, positions="compact")
    reading = session.read_question(QUESTION, room=0)
    held = len(tiny.prefix_ids) + reading.context.visible_tokens() + reading.local_kv.length
    assert reading.next_position <= held + 12
    assert torch.isfinite(session.prefill(QUESTION)).all()


@pytest.mark.parametrize("name", SUPPORTED)
def test_recent_steps_are_bounded_counted_and_reported(tiny: Backbone, name: str) -> None:
    session = watched(tiny, 7, name, budget=24, recent_frames=5)
    assert isinstance(session.memory, WithRecent)
    recent = session.memory.part.steps
    assert [one.step for one in recent] == [4, 5, 6]
    bytes_of = session.memory.nbytes()
    assert bytes_of["recent"] > 0
    tokens = session.memory.report()["recent_tokens"]
    assert tokens == sum(len(one.positions) for one in recent)
    # A question does not read the recent steps from the memory as well, where the memory has them as single tokens.
    answer = session.ask(QUESTION)
    assert answer.context_tokens <= len(tiny.prefix_ids) + 24 + tokens
    for seed in range(7, 9):
        session.watch(random_frames(seed))
    assert session.memory.nbytes()["recent"] == bytes_of["recent"]


def test_a_question_reads_no_more_than_the_budget_where_the_memory_has_the_recent_steps(tiny: Backbone) -> None:
    plain, afresh = (watched(tiny, 9, "sliding-window", budget=24, recent_frames=n).ask(QUESTION) for n in (0, 6))
    assert afresh.context_tokens == plain.context_tokens


@pytest.mark.parametrize("cut", [0, 2, 5])
def test_a_stream_continued_from_a_state_is_the_same_stream(tiny: Backbone, tmp_path: Path, cut: int) -> None:
    whole = watched(tiny, 7, "durable", budget=24, recent_frames=4)
    part = watched(tiny, cut, "durable", budget=24, recent_frames=4)
    path = tmp_path / "state.safetensors"
    # A question changes nothing.
    part.ask(QUESTION)
    protokv.save(part, path)
    resumed = protokv.load(path, tiny)
    for seed in range(cut, 7):
        resumed.watch(random_frames(seed))
    ours, theirs = whole.tensors(), resumed.tensors()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert torch.equal(whole.prefill(QUESTION), resumed.prefill(QUESTION))


def change(tensors: Mapping[str, Tensor], name: str, index: tuple[int, ...], value: float) -> dict[str, Tensor]:
    changed = {key: tensor.clone() for key, tensor in tensors.items()}
    changed[name][index] = value
    return changed


@pytest.mark.parametrize(
    ("name", "index", "value"),
    [
        ("recent.steps", (0, 0), 1),
        ("recent.steps", (0, 3), -1),
        ("recent.steps", (1, 4), 10**9),
    ],
)
def test_a_state_whose_recent_steps_make_no_sense_is_refused(
    tiny: Backbone, name: str, index: tuple[int, ...], value: float
) -> None:
    session = watched(tiny, 4, "durable", budget=24, recent_frames=4)
    state = checkpoint.to_state(session)
    with pytest.raises(StateCorrupt, match="recent"):
        checkpoint.from_state(replace(state, tensors=change(state.tensors, name, index, value)), tiny)
    without = {key: tensor for key, tensor in state.tensors.items() if key != name}
    with pytest.raises(StateCorrupt, match="recent"):
        checkpoint.from_state(replace(state, tensors=without), tiny)


def test_memories_that_cannot_read_afresh_refuse_recent_frames(tiny: Backbone) -> None:
    for name in CONFIGS.keys() - set(SUPPORTED):
        with pytest.raises(ConfigError, match="recent_frames"):
            watched(tiny, 1, name, recent_frames=4)
    with pytest.raises(ConfigError, match="recent_frames"):
        MemoryConfig.of("durable", recent_frames=-1)
