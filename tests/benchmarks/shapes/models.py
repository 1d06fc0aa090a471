"""Models of published shapes with random weights; nothing is downloaded.

The numbers are those of the `config.json` of the checkpoints (https://huggingface.co/Qwen/Qwen2.5-VL-7B-Instruct and
https://huggingface.co/llava-hf/llava-onevision-qwen2-7b-ov-hf). A step is 196 tokens in both: 14 x 14 of a frame. The
classes are transformers' own, wrapped by this package's backbones as a loaded checkpoint is.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from protokv.backbones.llava_onevision import LlavaOnevision, read_frames
from protokv.backbones.pixels import PixelConfig
from protokv.backbones.qwen_vl import QwenVL
from protokv.core.backbone import Backbone, BackboneIdentity
from protokv.core.hook import NAME, register
from protokv.core.tensors import MemoryShape

# The language model of both is Qwen2-7B's.
_TEXT: dict[str, Any] = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "bos_token_id": None,
    "eos_token_id": None,
}
PREFIX, QUESTION = 14, 20
"""Tokens before and after the video."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One model.

    Attributes:
        kind: class of transformers' config, without `Config`.
        text, vision: fields of the two configs.
        vision_depth: the field of `vision` that counts its layers.
        frame: pixels of a side of a frame, and frames of a step.
        components: P, of a position.
    """

    kind: str
    text: dict[str, Any]
    vision: dict[str, Any]
    vision_depth: str
    frame: tuple[int, int]
    components: int
    tokens: int = 196

    @property
    def layers(self) -> int:
        return int(self.text["num_hidden_layers"])

    @property
    def vision_layers(self) -> int:
        return int(self.vision[self.vision_depth])

    @property
    def head_size(self) -> int:
        return int(self.text["hidden_size"] // self.text["num_attention_heads"])

    def cut(self, layers: int, vocabulary: int) -> Shape:
        """Return the same model with fewer layers in both parts, and with fewer words."""
        text = self.text | {"num_hidden_layers": layers, "vocab_size": vocabulary}
        vision = self.vision | {self.vision_depth: min(layers, self.vision_layers)}
        if "fullatt_block_indexes" in vision:
            # Most of its layers attend within windows, and so does the first.
            vision["fullatt_block_indexes"] = [i for i in vision["fullatt_block_indexes"] if i < layers]
        return Shape(self.kind, text, vision, self.vision_depth, self.frame, self.components, self.tokens)

    def memory(self, dtype: torch.dtype, device: str = "meta") -> MemoryShape:
        """Return the shape of a memory for it."""
        heads = self.text["num_key_value_heads"]
        return MemoryShape(self.layers, heads, self.head_size, self.components, PREFIX, dtype, torch.device(device))


MODELS = {
    "qwen2.5-vl-7b": Shape(
        kind="Qwen2_5_VL",
        text=_TEXT
        | {
            "vocab_size": 152064,
            "max_position_embeddings": 128000,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        },
        vision={
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 3584,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "tokens_per_second": 2,
        },
        vision_depth="depth",
        frame=(392, 2),
        components=3,
    ),
    "llava-ov-7b": Shape(
        kind="LlavaOnevision",
        text=_TEXT
        | {
            "model_type": "qwen2",
            "vocab_size": 152000,
            "max_position_embeddings": 32768,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        vision={
            "model_type": "siglip_vision_model",
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_attention_heads": 16,
            "num_hidden_layers": 26,
            "image_size": 384,
            "patch_size": 14,
            "vision_use_head": False,
        },
        vision_depth="num_hidden_layers",
        frame=(384, 1),
        components=1,
    ),
}


class _Prompt:
    """A prompt of arbitrary tokens."""

    prefix_ids = list(range(PREFIX))  # noqa: RUF012

    def suffix_ids(self, question: str, turns: Sequence[Any] = ()) -> list[int]:
        return list(range(QUESTION))


class _Words:
    """A tokenizer that ends no answer."""

    eos_token_id = -1

    def decode(self, ids: list[int], **_: Any) -> str:
        return "x" * len(ids)


def build(shape: Shape, dtype: torch.dtype, device: torch.device) -> Backbone:
    """Return the model on the device, with random weights."""
    import transformers

    register()
    config = getattr(transformers, f"{shape.kind}Config")(
        text_config=copy.deepcopy(shape.text), vision_config=copy.deepcopy(shape.vision), tie_word_embeddings=False
    )
    cls = getattr(transformers, f"{shape.kind}ForConditionalGeneration")
    with device:
        model: nn.Module = cls._from_config(
            config, dtype=dtype, attn_implementation={"text_config": NAME, "vision_config": "sdpa"}
        )
    model.eval().requires_grad_(False)
    model.generation_config = transformers.GenerationConfig(eos_token_id=[-1])
    identity = BackboneIdentity(shape.kind, config.model_type, "", str(dtype)[6:], "")
    prompt: Any = _Prompt()
    side, _ = shape.frame
    if shape.kind == "LlavaOnevision":
        return LlavaOnevision(model, _Words(), prompt, read_frames({"size": {"height": side, "width": side}}), identity)
    return QwenVL(model, _Words(), prompt, PixelConfig(min_pixels=side * side, max_pixels=side * side), identity)


def frames_of(shape: Shape, seed: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return a step of noise in the size that the vision tower takes."""
    side, count = shape.frame
    return np.random.default_rng(seed).integers(0, 256, (count, side, side, 3), dtype=np.uint8)
