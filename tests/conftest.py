"""Shared by all tests: no network, one thread, a tiny random model of the real architecture, loaded as a user would."""

from __future__ import annotations

import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
# Forked tokenizer threads warn, and warnings are errors here.
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from protokv.backbones import load_backbone
from protokv.backbones.base import Backbone

settings.register_profile(
    "ci", max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("nightly", max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Small tensors are slower on several threads, and results must not depend on their number."""
    torch.set_num_threads(1)


WORDS = [
    "user",
    "assistant",
    "what",
    "who",
    "where",
    "is",
    "the",
    "a",
    "star",
    "ring",
    "red",
    "blue",
    "first",
    "last",
    "one",
    "two",
    "three",
    "?",
    ".",
]
SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + ' ' }}{% for c in m['content'] %}"
    "{% if c['type'] == 'video' %}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{% else %}{{ c['text'] }}{% endif %}{% endfor %}{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant ' }}{% endif %}"
)


def write_tokenizer(folder: Path) -> dict[str, int]:
    """A word-level tokenizer with the family's control tokens; returns its vocabulary."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate([*SPECIAL, "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=[t for t in SPECIAL if t not in ("<|im_end|>", "<|endoftext|>")],
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return vocabulary


def write_qwen2_5_vl(folder: Path, *, kv_heads: int = 2, heads: int = 4, tokens_per_second: int = 2) -> Path:
    """A random Qwen2.5-VL of a few thousand parameters, saved as `from_pretrained` wants it."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    vocabulary = write_tokenizer(folder)
    head_size = 16
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 48,
            "hidden_size": heads * head_size,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "out_hidden_size": heads * head_size,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "tokens_per_second": tokens_per_second,
            "window_size": 56,
            "fullatt_block_indexes": [1],
        },
        image_token_id=vocabulary["<|image_pad|>"],
        video_token_id=vocabulary["<|video_pad|>"],
        vision_start_token_id=vocabulary["<|vision_start|>"],
        vision_end_token_id=vocabulary["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    torch.manual_seed(7)
    model = Qwen2_5_VLForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            # The default initialisation is so small that attention is nearly uniform: errors would hide.
            parameter.normal_(0, 0.25) if parameter.ndim > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(
        '{"min_pixels": 3136, "max_pixels": 7056, "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}'
    )
    return folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen2_5_vl(tmp_path_factory.mktemp("tiny-qwen2-5-vl"))


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> Backbone:
    return load_backbone(str(tiny_folder), device="cpu", dtype="float32")


def random_frames(seed: int, n_frames: int = 2, height: int = 60, width: int = 90) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n_frames, height, width, 3), dtype=np.uint8)
