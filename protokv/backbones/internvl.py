"""InternVL 3 and 3.5 (transformers' layout, `-hf`) as backbones: one numbered frame a step, RoPE, Qwen2 or Qwen3.

A step has the form of transformers' processor for one frame of a video: a line `Frame8: <img>...</img>`. This text
belongs to the step, as in Qwen3-VL. Frames are squares of one size (448 pixels and 256 visual tokens in the published
models), without the tiles that still images are cut into.

The processor counts the frames of a video. Here the number is the stream time in frames of the default rate, from 1:
the processor's number at that rate; at another rate, or after a gap, it still tells the time. The vision tower
(`model.get_image_features`: tower, pixel shuffle, projector) sees each frame by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt
from typing import Any, Final

import numpy as np
import torch

from protokv.backbones.adapter import Adapter, guard_internals
from protokv.backbones.chat import ChatPrompt
from protokv.backbones.files import read_video_processor
from protokv.backbones.loading import Placement, identify, load_model, load_tokenizer
from protokv.backbones.pixels import check_images, make_processor
from protokv.core.backbone import BackboneIdentity, PreparedStep
from protokv.core.step import StepTokens

_VIDEO_TOKEN: Final = "<video>"
# The processor has no rate: it takes a number of frames.
_DEFAULT_FPS: Final = 1.0


class InternVL(Adapter):
    """InternVL 3 or 3.5 of any size, with the language model that its config names."""

    position_components = 1
    frames_per_step = 1

    def __init__(self, model: Any, tokenizer: Any, prompt: ChatPrompt, frames: Any, identity: BackboneIdentity) -> None:
        """Wrap a loaded `InternVLForConditionalGeneration`, with `frames` of `make_processor`.

        Raises:
            ModelError: an internal of transformers that this adapter relies on has moved.
        """
        super().__init__(model, tokenizer, prompt, identity)
        with guard_internals(model):
            self._image_features = model.model.get_image_features
            side, _ = model.config.vision_config.image_size
            patch, _ = model.config.vision_config.patch_size
        tokens = int(side // patch * model.config.downsample_ratio) ** 2
        self._frames = frames
        self._marks = (
            getattr(tokenizer, "start_image_token", "<img>"),
            getattr(tokenizer, "end_image_token", "</img>"),
        )
        self._grid = (isqrt(tokens), isqrt(tokens))
        self.default_fps = float(getattr(model.config, "protokv_fps", _DEFAULT_FPS))
        self.settings = {"frame_side": side, "frame_tokens": tokens}

    @classmethod
    def load(cls, path: str, name: str, config: Any, placement: Placement) -> InternVL:
        """Load weights, tokenizer, chat template and preprocessing of a folder."""
        from transformers import InternVLForConditionalGeneration

        model = load_model(InternVLForConditionalGeneration, path, placement)
        tokenizer, template = load_tokenizer(path)
        prompt = ChatPrompt(tokenizer, getattr(tokenizer, "video_token", _VIDEO_TOKEN), template)
        frames = make_processor(read_video_processor(path)[0])
        return cls(model, tokenizer, prompt, frames, identify(path, name, config, placement))

    def prepare(self, images: np.ndarray[Any, np.dtype[np.uint8]]) -> PreparedStep:
        """Prepare one frame, `[1, 3, side, side]`."""
        check_images(images, self.frames_per_step)
        found = self._frames(images=list(images), input_data_format="channels_last", return_tensors="pt")
        return PreparedStep(found["pixel_values"], self._grid)

    def embed_steps(self, steps: Sequence[PreparedStep], times_s: Sequence[float]) -> list[StepTokens]:
        """Return each frame's number and visual tokens between the marks; frames do not see each other."""
        pixels = torch.cat([step.pixels for step in steps]).to(self.device)
        features = self._image_features(pixel_values=pixels).pooler_output.to(self.device)
        opening, closing = self._marks
        tokens = []
        for time_s, own in zip(times_s, features, strict=True):
            # The small term undoes rounding errors of sums such as 3 * 0.1.
            number = int(time_s * self.default_fps + 1e-6) + 1
            apart = "\n" if time_s else ""
            tokens.append(self._framed(f"{apart}Frame{number}: {opening}", own, closing, self._grid))
        return tokens
