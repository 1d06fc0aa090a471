"""The table of published models: what their weights and states take."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import modeling_utils

from protokv.backbones import load_backbone
from protokv.backbones.gemma4 import FRAMES
from protokv.backbones.loading import unquantized
from protokv.backbones.pixels import PixelConfig
from protokv.backbones.sizes import DTYPES_OF_WEIGHTS, KNOWN_MODELS, KnownModel
from protokv.core.session import Session
from protokv.ingestion.estimate import most_bytes
from protokv.memories import MemoryConfig
from protokv.state import models
from tests.backbones.tiny import BUILDERS

GB = 10**9


def test_fewer_bits_take_fewer_bytes_and_quantisation_leaves_some_at_16_bits() -> None:
    for model in KNOWN_MODELS:
        sizes = [model.weight_bytes(dtype) for dtype in DTYPES_OF_WEIGHTS]
        assert sizes == sorted(sizes, reverse=True)
        assert model.weight_bytes("float16") == 2 * model.parameters
        assert model.weight_bytes("8bit") == model.parameters + model.kept
        assert model.needed_bytes("4bit") > model.weight_bytes("4bit")


def test_the_name_of_a_model_says_its_size_without_the_tower() -> None:
    """A name rounds, and many count the language model alone; the rest is less than a billion and a half."""
    for model in KNOWN_MODELS:
        found = re.search(r"-([0-9.]+)([bm])", model.name.lower())
        if model.name.startswith("google/gemma-4-E"):  # without the embeddings of each layer
            continue
        assert found, model.name
        stated = float(found[1]) / (1 if found[2] == "b" else 1000)
        assert 0.9 * stated < model.parameters / GB < stated + 1.5, model.name


def test_the_most_tokens_of_a_step_are_those_of_the_adapters() -> None:
    most = {model.family: model.tokens for model in KNOWN_MODELS}
    assert most["Qwen2-VL"] == most["Qwen3.5"] == PixelConfig().max_pixels // 28**2
    assert most["Gemma 4"] == FRAMES["max_soft_tokens"]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5", "gemma4", "internvl"])
def test_the_bytes_of_a_state_are_those_that_a_dry_run_says(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = load_backbone(str(BUILDERS[family](tmp_path)), device="cpu")
    config, carried = MemoryConfig.of("durable", budget=300), backbone.carried
    monkeypatch.setattr(models, "_PROMPT_TOKENS", len(backbone.prefix_ids))
    held = (carried.sliding, carried.recurrent, carried.convolution) if carried else (None, None, None)
    name = next(model.family for model in KNOWN_MODELS if model.family[:4].lower() == family[:4])
    shape = (backbone.layers, backbone.kv_heads, backbone.head_size)
    model = KnownModel("a/b", name, 0, 0, *shape, 9, "bfloat16", 0, *held)
    said = most_bytes(Session.start(backbone, config).memory, 0)
    # The table does not know how many layers read those of another.
    assert said is not None
    assert 0 <= said - models.state_bytes(model, config, backbone.dtype) <= (8 * carried.layers if carried else 0)


def test_what_quantisation_leaves_alone_is_what_the_table_counts() -> None:
    """Of a published configuration, LLaVA-OneVision-0.5B, with weights that take no memory."""
    from transformers import LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration

    text = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
    tower = {"model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "patch_size": 14}
    config = LlavaOnevisionConfig(
        text_config=text | {"model_type": "qwen2", "num_key_value_heads": 2, "vocab_size": 152000},
        vision_config=tower | {"num_hidden_layers": 26, "image_size": 384, "vision_use_head": False},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = LlavaOnevisionForConditionalGeneration(config)
    (known,) = (one for one in KNOWN_MODELS if "0.5b" in one.name)
    skipped = set(unquantized(model))
    weights = sum(one.numel() for one in model.parameters())
    layers = (one for name, one in model.named_modules() if isinstance(one, torch.nn.Linear) and name not in skipped)
    assert round(weights / 1e6) == known.parameters / 1e6
    assert round((weights - sum(one.weight.numel() for one in layers)) / 1e6) == known.kept / 1e6


def test_weight_files_are_mapped_only_where_what_they_hold_is_used_as_it_is(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, library = [], modeling_utils.safe_open

    def spy(*file: object, **settings: object) -> object:
        opened.append(settings["backend"])
        return library(*file, **settings)

    monkeypatch.setattr(modeling_utils, "safe_open", spy)
    for dtype in ("float32", "bfloat16"):
        load_backbone(str(tiny_folder), device="cpu", dtype=dtype)
    assert opened == ["mmap", "pread"]
    assert modeling_utils.safe_open is spy
