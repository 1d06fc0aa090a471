"""There is one kind of state: a session answers from what a cache saved, and a cache goes on with
what a session saved.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

import protokv
from protokv.backbones.stream_cache import CACHE_ARGUMENT
from protokv.core.backbone import Backbone
from protokv.core.step import StepTokens
from protokv.errors import ConfigError, StateMismatch
from protokv.memories import MemoryConfig
from protokv.texts import Keywords
from tests.backbones.texts import texts, watch
from tests.backbones.tiny import BUILDERS
from tests.conftest import random_frames, watched, widen
from tests.core.streams import same
from tests.tolerance import check_logits

QUESTION = "who is the star ?"
# One position a token, and three.
SERVED = ("internvl", "smolvlm", "qwen2_5_vl", "qwen3_vl", "qwen3_5")


@pytest.fixture(scope="module", params=widen(SERVED, ("smolvlm", "qwen2_5_vl", "qwen3_5")))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return BUILDERS[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="protokv"
    ).eval()


@pytest.mark.parametrize("count", [3, 20])
@pytest.mark.parametrize("memory", ["durable", "paper", "sliding-window"])
@torch.no_grad()
def test_a_question_to_the_state_of_a_cache_has_the_logits_of_the_cache(
    model: Any, backbone: Backbone, tmp_path: Path, memory: str, count: int
) -> None:
    cache = protokv.Cache(model, 60, memory)
    watch(model, cache, texts(count))
    path = tmp_path / "talk.safetensors"
    cache.save(path)
    session = protokv.load(path, backbone)
    ids = backbone.question_ids(QUESTION)[0]
    expected = model(**cache.question({"input_ids": torch.tensor([ids])})).logits[0]
    found = session.prefill(QUESTION)
    check_logits(session, found, expected)
    assert session.ask(QUESTION).stream_time_s == count * session.clock.step_seconds


@torch.no_grad()
def go_on(model: Any, cache: protokv.Cache, step: StepTokens, positions: torch.Tensor) -> None:
    """Forward an embedded step by the model's own decoder, and commit it."""
    more: Keywords = {}
    if step.deepstack is not None:
        mask = torch.zeros(1, len(step), dtype=torch.bool)
        mask[0, step.visual] = True
        more = {"visual_pos_masks": mask, "deepstack_visual_embeds": list(step.deepstack)}
    place = cache.decoder.to_ids(positions)
    decoder = cache.decoder.module
    decoder(
        inputs_embeds=step.embeddings[None], position_ids=place, **{CACHE_ARGUMENT: cache}, **more
    )
    cache.commit(coordinates=step.coordinates())


@pytest.mark.parametrize("memory", ["durable", "sliding-window"])
def test_a_cache_goes_on_with_the_state_of_a_session_as_the_session_does(
    model: Any, backbone: Backbone, tmp_path: Path, memory: str
) -> None:
    session = watched(backbone, MemoryConfig.of(memory, budget=60), range(5))
    path = tmp_path / "watched.safetensors"
    protokv.save(session, path)
    cache = protokv.Cache.load(path, model)
    assert (cache.seen, cache.steps) == (session.sink_tokens + session.clock.tokens_seen, 5)
    for seed in range(5, 9):
        frames = random_frames(seed, backbone.frames_per_step)
        step = session.embed(frames, session.clock.next_start_s)
        (placed,) = session.position_steps([step], [session.clock.next_start_s])
        go_on(model, cache, step, placed.positions)
        session.watch(frames)
    cache.save(tmp_path / "again.safetensors")
    assert same(session.tensors(), cache.stream.tensors())
    expected = session.prefill(QUESTION)
    again = protokv.load(tmp_path / "again.safetensors", backbone)
    assert torch.equal(again.prefill(QUESTION), expected)


def test_a_session_says_what_it_cannot_do_with_tokens_that_a_model_placed(
    model: Any, backbone: Backbone, tmp_path: Path
) -> None:
    cache = protokv.Cache(model, 60)
    watch(model, cache, texts(3))
    cache.save(tmp_path / "talk.safetensors")
    session = protokv.load(tmp_path / "talk.safetensors", backbone)
    frames = random_frames(0, backbone.frames_per_step)
    if backbone.position_components == 1:
        session.watch(frames)
        assert session.ask(QUESTION, evidence=True).evidence is not None
        return
    with pytest.raises(ConfigError, match="cannot go on"):
        session.watch(frames)
    with pytest.raises(ConfigError, match="tell no time"):
        session.ask(QUESTION, evidence=True)


def test_a_model_whose_weights_are_not_those_of_its_files_is_another_model(
    folder: Path, backbone: Backbone, tmp_path: Path
) -> None:
    other = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="protokv")
    cache = protokv.Cache(other.eval(), 60)
    watch(other, cache, texts(3))
    cache.save(tmp_path / "same.safetensors")
    protokv.load(tmp_path / "same.safetensors", backbone)
    with torch.no_grad():
        other.get_input_embeddings().weight.add_(1)
    cache.save(tmp_path / "other.safetensors")
    with pytest.raises(StateMismatch, match="weights_digest"):
        protokv.load(tmp_path / "other.safetensors", backbone)
