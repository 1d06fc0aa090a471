"""`protokv.watching` gives the session of the same model loaded from its folder, and leaves the
model as it was.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoTokenizer,
    LlamaForCausalLM,
)

import protokv
from protokv.errors import ConfigError, ModelError, StateMismatch
from protokv.stream.session import Session
from tests.backbones.test_untested import write_llava
from tests.backbones.tiny import BUILDERS, write_llama
from tests.conftest import random_frames

FRAMES = random_frames(0, 12, 40, 60)


@pytest.fixture(params=["qwen2_5_vl", "qwen3_vl", "smolvlm", "llava"])
def held(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Any, Any]:
    """A folder, and its model with its tokenizer, or with what stands for its processor, which
    needs torchvision.
    """
    folder = (BUILDERS | {"llava": write_llava})[request.param](tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    processor = AutoTokenizer.from_pretrained(folder)
    if (folder / "preprocessor_config.json").is_file():
        images = AutoImageProcessor.from_pretrained(folder, backend="pil")
        processor = SimpleNamespace(tokenizer=processor, image_processor=images)
    return folder, model, processor


def push(session: Session, start: int, stop: int) -> None:
    for i in range(start, stop):
        session.push(FRAMES[i], i / session.clock.fps)


def test_a_held_model_watches_as_a_loaded_one_and_is_left_as_it_was(
    held: tuple[Path, Any, Any],
) -> None:
    folder, model, processor = held
    loaded = protokv.load_backbone(str(folder), device="cpu", dtype="float32")
    path = folder / "state.safetensors"
    expected = Session.start(loaded, protokv.DurableConfig(budget=24, seed=3), fps=2.0)
    push(expected, 0, 12)
    with protokv.watching(model, processor, "24", seed=3, fps=2.0) as session:
        assert model.config.text_config._attn_implementation == "protokv"
        assert session.backbone.identity == loaded.identity
        push(session, 0, 8)
        protokv.save(session, path)
    assert (
        model.config.text_config._attn_implementation
        == model.config.vision_config._attn_implementation
        == "sdpa"
    )
    with protokv.watching(model, processor, state=path) as session:
        push(session, 8, 12)
        torch.testing.assert_close(session.tensors(), expected.tensors(), rtol=0, atol=0)
        assert (session.clock, session.ask("who ?").text) == (
            expected.clock,
            expected.ask("who ?").text,
        )


@pytest.mark.parametrize("held", ["qwen2_5_vl", "smolvlm"], indirect=True)
def test_a_session_ends_with_its_block(held: tuple[Path, Any, Any]) -> None:
    _, model, processor = held
    with protokv.watching(model, processor, 24, fps=2.0) as session:
        push(session, 0, 4)
        session.ask("who ?")
    for use in (
        lambda: session.ask("who ?"),
        lambda: session.prefill("who ?"),
        lambda: session.choose("who ?", ("a", "b")),
        lambda: push(session, 4, 8),
        lambda: session.watch(FRAMES[:2], 2.0),
    ):
        with pytest.raises(ConfigError, match="has ended with its `with` block"):
            use()


@pytest.mark.parametrize("held", ["llava"], indirect=True)
def test_what_cannot_watch_is_refused_and_attention_is_given_back(
    held: tuple[Path, Any, Any], tmp_path: Path
) -> None:
    (folder, model, processor), path = held, tmp_path / "state.safetensors"
    with protokv.watching(model, processor) as session:
        protokv.save(session, path)
    with (
        pytest.raises(ConfigError, match="one picture"),
        protokv.watching(model, processor) as session,
    ):
        session.push(FRAMES, 0.0)
    # A model without files is known by its weights.
    model.name_or_path = ""
    llama = (
        LlamaForCausalLM.from_pretrained(write_llama(folder)),
        AutoTokenizer.from_pretrained(folder),
    )
    for pair, error, said in (
        ((model, processor), StateMismatch, "backbone.weights_digest"),
        ((model, processor.tokenizer), ConfigError, "does not prepare both text and frames"),
        ((model, processor.image_processor), ConfigError, "does not prepare both text and frames"),
        (llama, ModelError, "an internal of LlamaForCausalLM"),
        ((model, processor), ConfigError, "being trained"),
    ):
        model.train(said == "being trained")
        with pytest.raises(error, match=said), protokv.watching(*pair, state=path):
            pytest.fail("it watches")
    assert model.config.text_config._attn_implementation == "sdpa"
