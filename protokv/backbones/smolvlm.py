"""SmolVLM2 as a backbone: one frame a step, after its time as text, RoPE, a small Llama.

A step has the form of transformers' processor for one frame of a video: a line `Frame from 00:07:`,
then the visual tokens between the marks of an unsplit image. This text belongs to the step, as in
Qwen3-VL. The chat template is the one that the processor uses for videos; those of the folders know
images only. In front of the frames the processor writes `You are provided the following series of
eight frames from a 0:00:08 [H:MM:SS] video.` A stream has no length, so the sentence stands without
both numbers (`_INTRO`). All other tokens are the processor's.

Frames are shrunk or grown to the longest edge of `video_sampling`, then to the square of the vision
tower, both by PIL with the filter of the file. transformers takes `size`, that of still images, for
the first where a file has both.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt
from typing import Any

import torch
from torch import Tensor

from protokv.backbones.adapter import TransformersBackbone
from protokv.backbones.chat import PromptTemplate
from protokv.backbones.pixels import FILE_SETTINGS
from protokv.core.backbone import PreparedStep
from protokv.texts import JsonObject, Keywords

_INTRO = "You are provided the following series of frames from a video.\n"
_OUTRO = "\n\n"
_OF_FILE = (*FILE_SETTINGS, "max_image_size")


class SmolVLM(TransformersBackbone):
    """SmolVLM2 of any size: 64 tokens a frame with 256M and 500M, 81 with 2.2B."""

    def __init__(self, model: Any, *parts: Any) -> None:
        """Wrap a loaded `SmolVLMForConditionalGeneration`."""
        super().__init__(model, *parts)
        vision = model.config.vision_config
        side = self._frames.max_image_size["longest_edge"]
        # `get_image_features` would drop a frame whose pixels are all 0.
        self._vision = model.model.vision_model
        self._connector = model.model.connector
        tokens = (vision.image_size // vision.patch_size // model.config.scale_factor) ** 2
        self._grid = (isqrt(tokens), isqrt(tokens))
        self.settings = {
            "longest_edge": self._frames.size["longest_edge"],
            "frame_side": side,
            "frame_tokens": tokens,
        }

    @classmethod
    def make_prompt(cls, config: Any, tokenizer: Any, template: str | None) -> PromptTemplate:
        """Return the prompt by the template that the processor uses for videos, whatever the folder
        has.
        """
        from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE

        own = str(DEFAULT_CHAT_TEMPLATE).replace(cls.video_token, _INTRO + cls.video_token + _OUTRO)
        return super().make_prompt(config, tokenizer, own)

    @staticmethod
    def make_frames(raw: JsonObject, of_video: bool) -> Any:
        """Return the processor of frames that a file asks for; without a size for video, of squares
        at once.
        """
        from transformers.models.smolvlm.image_processing_pil_smolvlm import (
            SmolVLMImageProcessorPil,
        )

        settings = {name: raw[name] for name in _OF_FILE if name in raw}
        square = settings.get("max_image_size", SmolVLMImageProcessorPil.max_image_size)
        size = (
            (raw.get("video_sampling") or {}).get("video_size")
            or (of_video and raw.get("size"))
            or square
        )
        return SmolVLMImageProcessorPil(**settings, size=size, do_image_splitting=False)

    def look(self, steps: Sequence[PreparedStep]) -> Sequence[Tensor]:
        """Run frames through tower and connector; they do not see each other there."""
        vision = self._vision
        pixels = self._join_pixels(steps)
        # Frames have no padding. Left alone, the tower looks for it, and the host waits for what it
        # finds.
        sides = (side // vision.patch_size for side in pixels.shape[2:])
        whole = torch.ones(len(pixels), *sides, dtype=torch.bool, device=pixels.device)
        patches = vision.embeddings(pixel_values=pixels, patch_attention_mask=whole)
        seen = vision.encoder(inputs_embeds=patches, attention_mask=None).last_hidden_state
        return list(self._connector(vision.post_layernorm(seen)))

    def name_pixels(self, step: PreparedStep) -> Keywords:
        """Return one frame as the images of one prompt."""
        pixels = self._join_pixels([step])
        return {"token": self._model.config.image_token_id, "pixel_values": pixels[None]}

    def frame_texts(self, time_s: float) -> tuple[str, str]:
        """Return the time of a frame, and the marks of an unsplit image."""
        mark = "<fake_token_around_image>"
        return (
            f"\nFrame from {int(time_s // 60):02d}:{int(time_s % 60):02d}:{mark}<global-img>",
            mark,
        )
