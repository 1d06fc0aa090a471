"""SmolVLM2 as a backbone: one frame a step, after its time as text, RoPE, a small Llama.

A step has the form of transformers' processor for one frame of a video: a line `Frame from 00:07:`, then the visual
tokens between the marks of an unsplit image. This text belongs to the step, as in Qwen3-VL. The chat template is the
one that the processor uses for videos, whatever a folder has: the published ones know images only.

In front of the frames the processor writes `You are provided the following series of eight frames from a 0:00:08
[H:MM:SS] video.` A stream has no length, and the prefix is forwarded before the first frame. Any number would be false
for most of the stream, so the sentence stands without both (`INTRO`); the frames carry their times. All other tokens
are the processor's.

Frames are shrunk or grown to the longest edge of `video_sampling`, then to the square of the vision tower, both by PIL
with the filter of the file. transformers takes `size`, that of still images, for the first of these where a file has
both.
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
from protokv.backbones.pixels import check_images, check_steps
from protokv.core.backbone import BackboneIdentity, PreparedStep
from protokv.core.step import StepTokens

_VIDEO_TOKEN: Final = "<video>"
INTRO: Final = "You are provided the following series of frames from a video.\n"
OUTRO: Final = "\n\n"
_DEFAULT_FPS: Final = 1.0
_OPENING, _CLOSING = "<fake_token_around_image><global-img>", "<fake_token_around_image>"
_OF_FILE: Final = ("image_mean", "image_std", "rescale_factor", "resample", "max_image_size")


class SmolVLM(Adapter):
    """SmolVLM2 of any size: 64 tokens a frame with 256M and 500M, 81 with 2.2B."""

    position_components = 1
    frames_per_step = 1

    def __init__(
        self, model: Any, tokenizer: Any, prompt: ChatPrompt, frames: Any, fps: float, identity: BackboneIdentity
    ) -> None:
        """Wrap a loaded `SmolVLMForConditionalGeneration`, with the processor of frames and the rate of its files.

        Raises:
            ModelError: an internal of transformers that this adapter relies on has moved.
        """
        super().__init__(model, tokenizer, prompt, identity)
        with guard_internals(model):
            self._vision, self._connector = model.model.vision_model, model.model.connector
        vision, side = model.config.vision_config, frames.max_image_size["longest_edge"]
        self._frames = frames
        tokens = (vision.image_size // vision.patch_size // model.config.scale_factor) ** 2
        self._grid = (isqrt(tokens), isqrt(tokens))
        self.default_fps = float(getattr(model.config, "protokv_fps", fps))
        self.settings = {"longest_edge": frames.size["longest_edge"], "frame_side": side, "frame_tokens": tokens}

    @classmethod
    def load(cls, path: str, name: str, config: Any, placement: Placement) -> SmolVLM:
        """Load weights, tokenizer and preprocessing of a folder."""
        from transformers import SmolVLMForConditionalGeneration
        from transformers.models.smolvlm import processing_smolvlm

        model = load_model(SmolVLMForConditionalGeneration, path, placement)
        tokenizer, _ = load_tokenizer(path)
        with guard_internals(processing_smolvlm):
            template = processing_smolvlm.DEFAULT_CHAT_TEMPLATE.replace(_VIDEO_TOKEN, INTRO + _VIDEO_TOKEN + OUTRO)
        prompt = ChatPrompt(tokenizer, _VIDEO_TOKEN, template)
        raw, of_video = read_video_processor(path)
        fps = float((raw.get("video_sampling") or {}).get("fps", _DEFAULT_FPS))
        frames = make_smolvlm_processor(raw, of_video=of_video)
        return cls(model, tokenizer, prompt, frames, fps, identify(path, name, config, placement))

    def prepare(self, images: np.ndarray[Any, np.dtype[np.uint8]]) -> PreparedStep:
        """Prepare one frame, `[1, 3, side, side]`."""
        check_images(images, self.frames_per_step)
        found = self._frames(images=list(images), input_data_format="channels_last", return_tensors="pt")
        return PreparedStep(found["pixel_values"][0].float(), self._grid)

    def embed_steps(self, steps: Sequence[PreparedStep], times_s: Sequence[float]) -> list[StepTokens]:
        """Return each frame's time and visual tokens between the marks; frames do not see each other."""
        pixels = torch.cat([step.pixels for step in steps]).to(self.device, self.dtype)
        features = self._connector(self._vision(pixel_values=pixels).last_hidden_state).to(self.device)
        stamps = [f"\nFrame from {int(time_s // 60):02d}:{int(time_s % 60):02d}:{_OPENING}" for time_s in times_s]
        return [self._framed(stamp, own, _CLOSING, self._grid) for stamp, own in zip(stamps, features, strict=True)]


def make_smolvlm_processor(raw: dict[str, Any], *, of_video: bool) -> Any:
    """Return the processor of frames that a preprocessor file, read as a dictionary, asks for.

    Without a size for video, frames are those of a square at once.

    Raises:
        ModelError: it asks for other steps than resizing, rescaling and normalising.
    """
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    check_steps(raw)
    settings = {name: raw[name] for name in _OF_FILE if name in raw}
    square = settings.get("max_image_size", SmolVLMImageProcessorPil.max_image_size)
    size = (raw.get("video_sampling") or {}).get("video_size") or (of_video and raw.get("size")) or square
    return SmolVLMImageProcessorPil(**settings, size=size, do_image_splitting=False)
