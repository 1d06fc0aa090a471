"""InternVL 3 and 3.5 (transformers' layout, `-hf`) as backbones: one numbered frame a step, RoPE,
Qwen2 or Qwen3.

A step has the form of transformers' processor for one frame of a video: a line `Frame8:
<img>...</img>`. This text belongs to the step, as in Qwen3-VL. Frames are squares of one size (448
pixels and 256 visual tokens in the published models), without the tiles that still images are cut
into. The processor counts the frames of a video. Here the number is the stream time in frames of
the default rate, from 1; at another rate, or after a gap, it still tells the time.
"""

from __future__ import annotations

from math import isqrt
from typing import Any

from protokv.backbones.adapter import TransformersBackbone
from protokv.core.backbone import PreparedStep
from protokv.texts import Keywords


class InternVL(TransformersBackbone):
    """InternVL 3 or 3.5 of any size, with the language model that its config names."""

    def __init__(self, model: Any, tokenizer: Any, *parts: Any) -> None:
        """Wrap a loaded `InternVLForConditionalGeneration`."""
        super().__init__(model, tokenizer, *parts)
        (side, _), (patch, _) = (
            model.config.vision_config.image_size,
            model.config.vision_config.patch_size,
        )
        tokens = int(side // patch * model.config.downsample_ratio) ** 2
        self._opening = getattr(tokenizer, "start_image_token", "<img>")
        self._closing = getattr(tokenizer, "end_image_token", "</img>")
        self._grid = (isqrt(tokens), isqrt(tokens))
        self.settings = {"frame_side": side, "frame_tokens": tokens}

    def name_pixels(self, step: PreparedStep) -> Keywords:
        """Return one frame as an image."""
        pixels = self._join_pixels([step])
        return {"token": self._model.config.image_token_id, "pixel_values": pixels}

    def frame_texts(self, time_s: float) -> tuple[str, str]:
        """Return the number of a frame, and the marks of an image."""
        # The small term undoes rounding errors of sums such as 3 * 0.1.
        number = int(time_s * self.default_fps + 1e-6) + 1
        apart = "\n" if time_s else ""
        return f"{apart}Frame{number}: {self._opening}", self._closing
