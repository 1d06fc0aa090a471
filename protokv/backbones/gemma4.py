"""Gemma 4 as a backbone: one frame a step, after its time as text, and a language model of sliding
and full layers.

A step has the form of transformers' processor for one frame of a video: `00:07 <boi>...<eoi>`, the
stream time in minutes and seconds, with a space before it unless it is 0. This text belongs to the
step, as in Qwen3-VL. A frame keeps its shape and has at most 70 tokens; transformers' PIL image
processor prepares it by the settings for video.

Five of six layers attend within a window. A memory sees the full layers alone, which have heads of
their own size and rotate a part of each key. The last layers of small models share the keys and
values of earlier ones. In large models the visual tokens of a frame see each other both ways within
the window: exact, because a step is forwarded whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from protokv.backbones.adapter import TransformersBackbone
from protokv.core.backbone import PreparedStep, check_tokens_per_frame
from protokv.core.step import Images
from protokv.errors import ModelError
from protokv.texts import JsonObject, Keywords

# Defaults of transformers' video processor; a still image has 280 tokens.
GEMMA4_VIDEO_SETTINGS = {
    "patch_size": 16,
    "max_soft_tokens": 70,
    "pooling_kernel_size": 3,
    "resample": 3,
}


class Gemma4(TransformersBackbone):
    """Gemma 4 of any size that reads images, dense or mixture of experts."""

    video_token = "<|video|>"
    words_form: ClassVar[tuple[str, str, str]] = ("", "\n{}\n", "")

    def __init__(self, model: Any, *parts: Any) -> None:
        """Wrap a loaded `Gemma4ForConditionalGeneration`. ModelError: the model sees no images."""
        if model.config.vision_config is None:
            raise ModelError(
                "it is no model that reads images", hint="use an instruction-tuned variant"
            )
        super().__init__(model, *parts)
        self.settings = {
            name: getattr(self._frames, name) for name in ("patch_size", "pooling_kernel_size")
        }
        self.limit_frames(self._frames.max_soft_tokens)

    @staticmethod
    def make_frames(raw: JsonObject, of_video: bool) -> Any:
        """Return the image processor, set to frames of a video."""
        from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

        read = {
            key: raw[key]
            for key in GEMMA4_VIDEO_SETTINGS
            if key in raw and (of_video or key != "max_soft_tokens")
        }
        return Gemma4ImageProcessorPil(**GEMMA4_VIDEO_SETTINGS | read)

    def limit_frames(self, tokens: int) -> None:
        """Give a frame at most so many tokens: one of the numbers that the image processor
        knows.
        """
        from transformers.models.gemma4.image_processing_pil_gemma4 import _SUPPORTED_SOFT_TOKENS

        check_tokens_per_frame(self.identity.name, _SUPPORTED_SOFT_TOKENS, tokens)
        self._frames.max_soft_tokens = tokens
        self.settings = {**self.settings, "frame_tokens": tokens}

    def prepare(self, images: Images) -> PreparedStep:
        """Prepare one frame, `[1, patches, numbers]` with column and row behind each patch; -1 for
        padding.
        """
        found = self._process(images)
        places = found["image_position_ids"]
        columns, rows = ((places[0].amax(0) + 1) // self._frames.pooling_kernel_size).tolist()
        return PreparedStep(torch.cat((found["pixel_values"].float(), places), 2), (rows, columns))

    def look(self, steps: Sequence[PreparedStep]) -> Sequence[Tensor]:
        """Run frames through the vision tower; they do not see each other there."""
        # The model's dtype may have no such places.
        pixels, places = self._move_pixels(steps).tensor_split((-2,), 2)
        found: Sequence[Tensor] = self._model.get_image_features(
            pixels, places.long()
        ).pooler_output
        return found

    def name_pixels(self, step: PreparedStep) -> Keywords:
        """Return one frame as a video."""
        pixels, places = self._move_pixels([step]).tensor_split((-2,), 2)
        return {
            "token": self._model.config.video_token_id,
            "pixel_values_videos": pixels.to(self.dtype),
            "video_position_ids": places.long(),
            "num_frames_per_video": torch.tensor([1]),
        }

    def frame_texts(self, time_s: float) -> tuple[str, str]:
        """Return the time of a frame, and the marks of an image."""
        config = self._model.config
        apart = " " if time_s else ""
        opening, closing = self._tokenizer.convert_ids_to_tokens(
            [config.boi_token_id, config.eoi_token_id]
        )
        return f"{apart}{int(time_s // 60):02d}:{int(time_s % 60):02d} {opening}", closing
