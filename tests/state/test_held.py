"""`protokv.watching` gives the session of the same model loaded from its folder, and leaves the model as it was."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoImageProcessor, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

import protokv
from protokv.core.session import Session
from protokv.errors import ConfigError, ModelError, StateMismatch
from tests.backbones.test_untested import write_llava
from tests.backbones.tiny import BUILDERS, write_llama
from tests.conftest import random_frames

FRAMES = random_frames(0, 12, 40, 60)
QUESTION = "what is the star ?"


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl", "smolvlm", "llava"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(request.param)
    return (BUILDERS | {"llava": write_llava})[request.param](made)


def hold(folder: Path) -> tuple[Any, Any]:
    """Return a model, and its tokenizer or what stands for its processor, which needs torchvision."""
    model, tokenizer = AutoModelForImageTextToText.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    if not (folder / "preprocessor_config.json").is_file():
        return model, tokenizer
    images = AutoImageProcessor.from_pretrained(folder, backend="pil")
    return model, SimpleNamespace(tokenizer=tokenizer, image_processor=images)


def push(session: Session, start: int, stop: int) -> None:
    for i in range(start, stop):
        session.push(FRAMES[i], i / session.clock.fps)


def test_a_held_model_watches_as_a_loaded_one_and_is_left_as_it_was(folder: Path, tmp_path: Path) -> None:
    loaded = protokv.load_backbone(str(folder), device="cpu", dtype="float32")
    expected = Session.start(loaded, protokv.DurableConfig(budget=24, seed=3), fps=2.0)
    push(expected, 0, 12)
    model, processor = hold(folder)
    path, text = tmp_path / "state.safetensors", model.config.get_text_config()
    with protokv.watching(model, processor, "24", seed=3, fps=2.0) as session:
        assert text._attn_implementation == "protokv"
        assert session.backbone.identity == loaded.identity
        push(session, 0, 8)
        protokv.save(session, path)
    assert text._attn_implementation == model.config.vision_config._attn_implementation == "sdpa"
    with protokv.watching(model, processor, state=path) as session:
        push(session, 8, 12)
        assert session.clock == expected.clock
        torch.testing.assert_close(session.tensors(), expected.tensors(), rtol=0, atol=0)
        assert session.ask(QUESTION).text == expected.ask(QUESTION).text


@pytest.mark.parametrize("folder", ["llava"], indirect=True)
def test_what_cannot_watch_is_refused_and_attention_is_given_back(folder: Path, tmp_path: Path) -> None:
    (model, processor), path = hold(folder), tmp_path / "state.safetensors"
    with protokv.watching(model, processor) as session:
        protokv.save(session, path)
    with pytest.raises(ConfigError, match="one picture"), protokv.watching(model, processor) as session:
        session.push(FRAMES, 0.0)
    # A model without files is known by its weights.
    model.name_or_path, llama = "", write_llama(tmp_path)
    for held, given, error, said in (
        (model, processor, StateMismatch, "backbone.weights_digest"),
        (model, processor.tokenizer, ConfigError, "does not prepare both text and frames"),
        (model, processor.image_processor, ConfigError, "does not prepare both text and frames"),
        (AutoModelForCausalLM.from_pretrained(llama), AutoTokenizer.from_pretrained(llama), ModelError, "LlamaForC"),
        (model, processor, ConfigError, "being trained"),
    ):
        model.train(said == "being trained")
        with pytest.raises(error, match=said), protokv.watching(held, given, state=path):
            pytest.fail("it watches")
    assert model.config.text_config._attn_implementation == "sdpa"
