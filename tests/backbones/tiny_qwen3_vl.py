"""A tiny random Qwen3-VL, and a question about a video as transformers' own processor and model take it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

PATCH, LAYERS_FED = 16, 2
# Of all frames of a video; a step of two frames has 4 to 9 tokens.
SIZE = {"shortest_edge": 2 * 4 * 1024, "longest_edge": 2 * 9 * 1024}
STAMP = ["<", ">", "seconds", *"0123456789"]


def write_tokenizer(folder: Path, special: Sequence[str], template: str) -> dict[str, int]:
    """Like `tiny.write_tokenizer`, but a number is one token a digit, so that steps differ in length."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from tests.backbones.tiny import WORDS

    vocabulary = {word: i for i, word in enumerate([*special, "<unk>", *WORDS, *STAMP])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)]
    )
    roles = {"unk_token": "<unk>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    others = [token for token in special if token not in roles.values()]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, extra_special_tokens=others, **roles)
    fast.chat_template = template
    fast.save_pretrained(folder)
    return vocabulary


def write_qwen3_vl(
    folder: Path, *, heads: int = 4, kv_heads: int = 2, max_positions: int = 32768, experts: int = 0
) -> Path:
    """A random Qwen3-VL of a few thousand parameters; with experts, its mixture of experts."""
    import transformers

    from tests.backbones.tiny import QWEN_SPECIAL, QWEN_TEMPLATE, qwen_tokens, save_random, text_settings

    vocabulary = write_tokenizer(folder, QWEN_SPECIAL, QWEN_TEMPLATE)
    pixels = {"size": SIZE, "patch_size": PATCH, "temporal_patch_size": 2, "merge_size": 2}
    statistics = {"image_mean": [0.5, 0.4, 0.6], "image_std": [0.5, 0.3, 0.2]}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(pixels | statistics))
    text = text_settings(heads, kv_heads, max_positions, mrope_section=[4, 2, 2], mrope_interleaved=True)
    mixture = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 24} if experts else {}
    name = "Qwen3VLMoe" if experts else "Qwen3VL"
    config = getattr(transformers, f"{name}Config")(
        text_config=text | {"head_dim": 16} | mixture,
        vision_config={
            "depth": 3,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "out_hidden_size": heads * 16,
            "patch_size": PATCH,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": list(range(LAYERS_FED)),
        },
        tie_word_embeddings=True,
        **qwen_tokens(vocabulary),
    )
    return save_random(getattr(transformers, f"{name}ForConditionalGeneration")(config), folder)


def write_qwen3_vl_moe(folder: Path, **changes: int) -> Path:
    """The mixture of experts."""
    return write_qwen3_vl(folder, experts=4, **changes)


def qwen3_vl_inputs(
    upstream: Any, video: Sequence[np.ndarray], question: str, step_seconds: float
) -> dict[str, Tensor]:
    """Text by the processor, pixels by the PIL image processor, positions by the model."""
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    config, tokenizer = upstream.model.config, upstream.tokenizer
    patches, (rows, columns) = qwen3_patches(upstream.folder, video)
    grid = torch.tensor([[len(video), rows, columns]])
    processor = object.__new__(Qwen3VLProcessor)
    processor.video_token, processor.image_token = "<|video_pad|>", "<|image_pad|>"
    processor.vision_start_token, processor.vision_end_token = "<|vision_start|>", "<|vision_end|>"
    processor.video_processor = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    metadata = SimpleNamespace(fps=2 / step_seconds, frames_indices=list(range(2 * len(video))))
    expanded = processor.replace_video_token({"video_grid_thw": grid, "video_metadata": [metadata]}, 0)
    content = [{"type": "video"}, {"type": "text", "text": question}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    (text,), _ = processor.get_text_with_replacements([text], videos_replacements=[expanded])
    ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
    return {
        "input_ids": ids,
        "mm_token_type_ids": 2 * (ids == config.video_token_id).int(),
        "pixel_values_videos": patches,
        "video_grid_thw": grid,
    }


def qwen3_patches(folder: Path, video: Sequence[np.ndarray]) -> tuple[Tensor, tuple[int, int]]:
    """Patches of all steps in order, and rows and columns of patches; see `upstream.qwen_patches`."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    raw = json.loads((folder / "video_preprocessor_config.json").read_text())
    processor = Qwen2VLImageProcessorPil(
        size={edge: pixels // 2 for edge, pixels in raw["size"].items()},
        patch_size=PATCH,
        image_mean=raw["image_mean"],
        image_std=raw["image_std"],
    )
    patches, grid = [], []
    for images in video:
        frames = [processor(images=[i], input_data_format="channels_last", return_tensors="pt") for i in images]
        both = torch.stack([frame["pixel_values"].reshape(-1, 3, 2, PATCH, PATCH)[:, :, 0] for frame in frames], 2)
        patches.append(both.flatten(1))
        grid = frames[0]["image_grid_thw"][0].tolist()
    return torch.cat(patches), (grid[1], grid[2])
