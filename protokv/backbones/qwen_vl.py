"""Qwen2-VL and Qwen2.5-VL as backbones: M-RoPE positions, temporal patches of two frames, PIL preprocessing.

The only file that touches these models' internals: the vision tower `model.visual`, the language model
`model.language_model`, its rotary embedding, and the language-model head. Positions are always passed explicitly:
transformers' own index starts the text after a video inside the video's time span, while generation goes on behind it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from protokv.attention import NAME, Tail, register
from protokv.backbones.base import Backbone, StepTokens
from protokv.backbones.identity import config_hash, read_json, weights_digest
from protokv.backbones.pixels import PixelConfig, patchify
from protokv.backbones.prompt import ChatPrompt
from protokv.context import Context
from protokv.errors import ModelError
from protokv.records import BackboneIdentity

VIDEO_TOKEN = "<|video_pad|>"
DEFAULT_FPS = 2.0


class QwenVL(Backbone):
    """Qwen2-VL or Qwen2.5-VL of any size, the embedded model included."""

    position_components = 3

    def __init__(
        self, model: Any, tokenizer: Any, pixels: PixelConfig, identity: BackboneIdentity, *, fps: float
    ) -> None:
        """Wrap a loaded `Qwen2VLForConditionalGeneration` or `Qwen2_5_VLForConditionalGeneration`.

        Raises:
            ModelError: an internal of transformers that this adapter relies on has moved.
        """
        try:
            self._visual = model.model.visual
            self._text = model.model.language_model
            self._head = model.lm_head
            self._rotary = self._text.rotary_emb
            self._embedding = self._text.embed_tokens
        except AttributeError as error:
            raise ModelError(
                f"this version of transformers has moved an internal of {type(model).__name__}: {error}",
                hint="install the range of transformers that protokv asks for",
            ) from error
        config = model.config.text_config
        self.identity = identity
        self.layers = config.num_hidden_layers
        self.kv_heads = config.num_key_value_heads
        self.head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.dtype, self.device = self._embedding.weight.dtype, self._embedding.weight.device
        self.frames_per_step = pixels.temporal_patch_size
        self.default_fps = fps
        self.max_position = getattr(config, "max_position_embeddings", None)
        self._pixels = pixels
        self.settings = {"min_pixels": pixels.min_pixels, "max_pixels": pixels.max_pixels}
        # Qwen2-VL counts temporal patches, Qwen2.5-VL counts time.
        self._tokens_per_second: float | None = getattr(model.config.vision_config, "tokens_per_second", None)
        self._tokenizer = tokenizer
        self._prompt = ChatPrompt(tokenizer, VIDEO_TOKEN)
        stop = model.generation_config.eos_token_id
        self.stop_ids = frozenset(stop if isinstance(stop, list) else [stop, tokenizer.eos_token_id]) - {None}

    @classmethod
    def load(cls, path: str, name: str, config: Any, *, dtype: torch.dtype, device: torch.device) -> QwenVL:
        """Load weights, tokenizer and preprocessing of a folder or hub name."""
        from transformers import (
            AutoTokenizer,
            Qwen2_5_VLForConditionalGeneration,
            Qwen2VLForConditionalGeneration,
        )

        register()
        kinds = {
            "qwen2_vl": Qwen2VLForConditionalGeneration,
            "qwen2_5_vl": Qwen2_5_VLForConditionalGeneration,
        }
        model = kinds[config.model_type].from_pretrained(
            path, dtype=dtype, attn_implementation={"text_config": NAME, "vision_config": "sdpa"}
        )
        model.to(device).eval().requires_grad_(False)
        identity = BackboneIdentity(
            name=name,
            family=config.model_type,
            config_hash=config_hash(config.to_dict()),
            weights_digest=weights_digest(path),
            dtype=str(dtype).removeprefix("torch."),
        )
        fps = float(getattr(config, "protokv_fps", DEFAULT_FPS))
        return cls(model, AutoTokenizer.from_pretrained(path), read_pixels(path), identity, fps=fps)

    @property
    def prefix_ids(self) -> list[int]:
        """Token ids in front of the video."""
        return self._prompt.prefix_ids

    def suffix_ids(self, question: str) -> list[int]:
        """Token ids behind the video."""
        return self._prompt.suffix_ids(question)

    def decode(self, ids: list[int]) -> str:
        """Text of generated ids, without special tokens."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def unknown_words(self, question: str) -> list[str]:
        """Words that a word-level tokenizer maps to its unknown token, once each; byte-level tokenizers have none."""
        unknown = self._tokenizer.unk_token_id
        if unknown is None:
            return []
        tokens = self._tokenizer(question, return_offsets_mapping=True, add_special_tokens=False)
        pairs = zip(tokens["input_ids"], tokens["offset_mapping"], strict=True)
        return list(dict.fromkeys(question[start:stop].lower() for token, (start, stop) in pairs if token == unknown))

    def embed_text(self, ids: list[int]) -> Tensor:
        """`[n, E]`."""
        embeddings: Tensor = self._embedding(torch.tensor(ids, device=self.device))
        return embeddings

    def embed_step(self, images: np.ndarray[Any, np.dtype[np.uint8]], time_s: float = 0.0) -> StepTokens:
        """One temporal patch through the vision tower; patches attend within it alone, so this is exact."""
        patches, (rows, columns) = patchify(images, self._pixels)
        merge = self._pixels.merge_size
        grid = torch.tensor([[1, rows * merge, columns * merge]], device=self.device)
        features = self._visual(patches.to(self.device, self.dtype), grid_thw=grid).pooler_output
        return StepTokens(features, (rows, columns))

    def step_positions(self, tokens: StepTokens, *, origin: int, start: int, index: int, time_s: float) -> Tensor:
        """(t, h, w) of every token: time or patches since the start, row, column, each from `origin`."""
        rows, columns = tokens.grid
        # The small term undoes the rounding of sums such as 3 * 0.1; transformers truncates likewise.
        per_second = self._tokens_per_second
        t = index if per_second is None else int(time_s * per_second + 1e-6)
        cell = torch.arange(rows * columns, device=self.device)
        return origin + torch.stack([torch.full_like(cell, t), cell // columns, cell % columns], dim=-1)

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """M-RoPE: each frequency band turns with the component that `mrope_section` gives it."""
        flat = positions.reshape(-1, 3).T[:, None].to(self.device)
        cos, sin = self._rotary(torch.zeros((), device=self.device), flat)
        shape = (*positions.shape[:-1], self.head_size)
        return cos[0].reshape(shape), sin[0].reshape(shape)

    def forward(
        self,
        embeddings: Tensor,
        positions: Tensor,
        context: Context,
        tail: Tail,
        *,
        step: StepTokens | None = None,
    ) -> Tensor:
        """`[T, E]` through the language model."""
        output = self._text(
            inputs_embeds=embeddings[None],
            position_ids=positions.T[:, None],
            use_cache=False,
            protokv_context=context,
            protokv_tail=tail,
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """`[..., vocabulary]` float32."""
        scores: Tensor = self._head(hidden).float()
        return scores


def read_pixels(path: str) -> PixelConfig:
    """How a Qwen-VL folder or hub repository prepares video frames.

    Newer folders describe video apart from images. Where only an image preprocessor is there, its limits are those
    of still images (up to 12.8 million pixels): a frame of a video is then held to the limit of the family's video
    processor, 768 tokens.
    """
    for filename, key in (
        ("processor_config.json", "video_processor"),
        ("video_preprocessor_config.json", None),
    ):
        raw = read_json(path, filename)
        raw = raw.get(key, {}) if key else raw
        if raw:
            return PixelConfig.from_files(raw)
    pixels = PixelConfig.from_files(read_json(path, "preprocessor_config.json"))
    return replace(pixels, max_pixels=min(pixels.max_pixels, PixelConfig().max_pixels))
