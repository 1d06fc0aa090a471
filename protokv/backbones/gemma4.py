"""Gemma 4 as a backbone: one frame a step, after its time as text, and a language model of sliding and full layers.

A step has the form of transformers' processor for one frame of a video: `00:07 <boi>...<eoi>`, the stream time in
minutes and seconds, with a space before it unless it is 0. This text belongs to the step, as in Qwen3-VL. A frame keeps
its shape and has at most 70 tokens; transformers' PIL image processor prepares it by the settings for video.

Five of six layers attend within a window. A memory sees the full layers alone, which have heads of their own size and
rotate a part of each key. The last layers of small models share the keys and values of earlier ones. In large models
the visual tokens of a frame see each other both ways within the window: exact, because a step is forwarded whole.

Some models add an embedding of every token to every layer. So an embedding here has three more numbers: the token's id
and one, to the base of 256, which any dtype holds. Visual tokens have 0 there; the model takes them for padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, ClassVar, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from protokv.backbones.adapter import Adapter
from protokv.backbones.pixels import check_images
from protokv.core.backbone import PreparedStep, check_cost
from protokv.core.step import StepTokens
from protokv.core.stream_cache import StreamCache
from protokv.errors import ModelError, SourceUnreadable

# Defaults of transformers' video processor; a still image has 280 tokens.
VIDEO_SETTINGS: Final = {"patch_size": 16, "max_soft_tokens": 70, "pooling_kernel_size": 3, "resample": 3}
_DIGITS: Final = (1, 256, 65536)


class Gemma4(Adapter):
    """Gemma 4 of any size that reads images, dense or mixture of experts."""

    video_token = "<|video|>"
    words_form: ClassVar[tuple[str, str, str]] = ("", "\n{}\n", "")

    def __init__(self, model: Any, tokenizer: Any, *parts: Any) -> None:
        """Wrap a loaded `Gemma4ForConditionalGeneration`. ModelError: the model sees no images."""
        config = model.config.get_text_config()
        if config.use_bidirectional_attention == "all" or model.config.vision_config is None:
            raise ModelError("it is no model that reads images and answers", hint="use an instruction-tuned variant")
        super().__init__(model, tokenizer, *parts)
        self._layered = bool(config.hidden_size_per_layer_input)
        self._both_ways = config.use_bidirectional_attention == "vision"
        self._softcap: float | None = config.final_logit_softcapping
        marks = [model.config.boi_token_id, model.config.eoi_token_id]
        self._opening, self._closing = tokenizer.convert_ids_to_tokens(marks)
        self._padding = config.pad_token_id or 0
        self.settings = {
            "patch_size": self._frames.patch_size, "pooling_kernel_size": self._frames.pooling_kernel_size
        }  # fmt: skip
        self.limit_frames(self._frames.max_soft_tokens)

    @staticmethod
    def make_frames(raw: dict[str, Any], of_video: bool) -> Any:
        """Return the image processor, set to frames of a video."""
        from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

        read = {key: raw[key] for key in VIDEO_SETTINGS if key in raw and (of_video or key != "max_soft_tokens")}
        return Gemma4ImageProcessorPil(**VIDEO_SETTINGS | read)

    def limit_frames(self, tokens: int) -> None:
        """Give a frame at most so many tokens: one of the numbers that the image processor knows."""
        from transformers.models.gemma4.image_processing_pil_gemma4 import _SUPPORTED_SOFT_TOKENS

        check_cost(self.identity.name, _SUPPORTED_SOFT_TOKENS, tokens)
        self._frames.max_soft_tokens = tokens
        self.settings = {**self.settings, "frame_tokens": tokens}

    def embed_token(self, token: Tensor) -> Tensor:
        """Return `[n, E]`, with the digits of the ids appended."""
        return self._with_digits(super().embed_token(token), token)

    def _with_digits(self, embeddings: Tensor, ids: Tensor | None) -> Tensor:
        """Return embeddings `[n, E]` with three digits appended to each, 0 without ids, in a model that needs them."""
        if not self._layered:
            return embeddings
        if ids is None:
            return pad(embeddings, (0, len(_DIGITS)))
        digits = torch.stack([(ids + 1) // base % 256 for base in _DIGITS], 1)
        return torch.cat((embeddings, digits.to(embeddings.dtype)), 1)

    def prepare(self, images: np.ndarray[Any, np.dtype[np.uint8]]) -> PreparedStep:
        """Prepare one frame, `[1, patches, numbers]`, padded to the most patches that a frame may have."""
        check_images(images, self.frames_per_step)
        try:
            found = self._frames(images=list(images), input_data_format="channels_last", return_tensors="pt")
        except ValueError as error:
            raise SourceUnreadable(f"a frame of {images.shape[2]} x {images.shape[1]} pixels: {error}") from error
        columns, rows = (found["image_position_ids"][0].amax(0) + 1).tolist()
        pool = self._frames.pooling_kernel_size
        return PreparedStep(found["pixel_values"].float(), (rows // pool, columns // pool))

    def look(self, steps: Sequence[PreparedStep]) -> Sequence[Tensor]:
        """Run frames through the vision tower; they do not see each other there."""
        pixels = torch.cat([step.pixels.to(self.device, non_blocking=True) for step in steps])
        places = torch.stack([self._patch_places(step, pixels.shape[1]) for step in steps]).to(self.device)
        features = torch.cat(self._model.get_image_features(pixels, places).pooler_output).to(self.device, self.dtype)
        return torch.split(self._with_digits(features, None), [prod(step.grid) for step in steps])

    def frame_texts(self, time_s: float) -> tuple[str, str]:
        """Return the time of a frame, and the marks of an image."""
        apart = " " if time_s else ""
        return f"{apart}{int(time_s // 60):02d}:{int(time_s % 60):02d} {self._opening}", self._closing

    def _patch_places(self, step: PreparedStep, patches: int) -> Tensor:
        """Return column and row of each patch of a frame, `[patches, 2]` int64, -1 for padding."""
        rows, columns = (side * self._frames.pooling_kernel_size for side in step.grid)
        places = torch.full((patches, 2), -1)
        index = torch.arange(rows * columns)
        places[: rows * columns] = torch.stack((index % columns, index // columns), 1)
        return places

    def _step_arguments(self, steps: Sequence[StepTokens], cache: StreamCache) -> dict[str, Any]:
        """Return masks by which visual tokens of a step see each other both ways, in a model trained so."""
        return self._decoder.block_masks(self._number_steps(steps), cache) if self._both_ways and steps else {}

    def logits(self, hidden: Tensor) -> Tensor:
        """Return `[..., vocabulary]` float32, kept within a bound if the config has one."""
        scores = super().logits(hidden)
        return scores if self._softcap is None else torch.tanh(scores / self._softcap) * self._softcap

    def _inputs(self, embeddings: Tensor) -> dict[str, Tensor]:
        """Return embeddings without the digits, and what the layers add of every token."""
        if not self._layered:
            return super()._inputs(embeddings)
        embedded, digits = embeddings.tensor_split((-len(_DIGITS),), 1)
        low, middle, high = digits.long().unbind(1)
        ids = low + _DIGITS[1] * middle + _DIGITS[2] * high - 1
        # Digits that are not finite must not be looked up.
        ids = ids.clamp(-1, self._text.config.vocab_size_per_layer_input - 1)
        ids = torch.where(ids < 0, self._padding, ids)
        return super()._inputs(embedded) | {"per_layer_inputs": self._text.get_per_layer_inputs(ids[None])}
