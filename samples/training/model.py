"""The shape of the embedded model: a Qwen2.5-VL of about one million parameters.

A frame has 3 x 3 cells of one token each. A step is one temporal patch of two frames, one second (2
fps), and one temporal position. Has the configuration, not the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from samples.training.vocabulary import PADDED_SIZE, token_ids

FPS: Final = 2.0
"""Frames per second of the model's input."""

SIDE: Final = 84
PATCH: Final = 14
MERGE: Final = 2
TOKENS: Final = 9
"""Visual tokens of a step, row by row of the 3 x 3 grid."""

IMAGE_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
IMAGE_STD: Final = (0.26862954, 0.26130258, 0.27577711)


SECTIONS: Final = (8, 4, 4)
"""Rotary pairs of a head that rotate by time, row and column."""


def make_config(
    layers: int = 4, hidden: int = 128, sections: Sequence[int] = SECTIONS
) -> Qwen2_5_VLConfig:
    """Return the configuration; experiments may change `layers` and `hidden` (a multiple of
    128).
    """
    ids = token_ids()
    text = {
        "vocab_size": PADDED_SIZE,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": hidden // 64,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 2e4,
            "mrope_section": list(sections),
        },
        "bos_token_id": ids["<|im_start|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "use_sliding_window": False,
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "out_hidden_size": hidden,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "window_size": 112,
        "tokens_per_second": 1,
        "fullatt_block_indexes": [0, 1],
    }
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
        protokv_fps=FPS,
    )


def make_model(seed: int, layers: int = 4, hidden: int = 128) -> Qwen2_5_VLForConditionalGeneration:
    """Return a freshly initialised model in float32."""
    torch.manual_seed(seed)
    return Qwen2_5_VLForConditionalGeneration(make_config(layers, hidden))
