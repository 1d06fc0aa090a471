"""Qwen2-VL and Qwen2.5-VL as backbones: M-RoPE positions, temporal patches of two frames, PIL preprocessing.

The vision tower `model.visual`, shared by later Qwen-VL families, takes flat patches and encodes each temporal patch by
itself. Positions are always passed explicitly: transformers' own index starts the text after a video inside the video's
time span.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, ClassVar, Self

import torch

from protokv.backbones.adapter import Adapter, guard_internals
from protokv.backbones.chat import ChatPrompt
from protokv.backbones.files import read_video_processor
from protokv.backbones.loading import Placement, identify, load_model, load_tokenizer
from protokv.backbones.pixels import PixelConfig, TimedGrid
from protokv.core.backbone import BackboneIdentity, PreparedStep
from protokv.core.step import StepTokens

VIDEO_TOKEN = "<|video_pad|>"
_DEFAULT_FPS = 2.0


class QwenVL(TimedGrid, Adapter):
    """Qwen2-VL or Qwen2.5-VL of any size."""

    position_components = 3
    # The whole video stands between two control tokens, so words close it and what follows opens another.
    words_form: ClassVar[tuple[str, str, str]] = ("<|vision_end|>", "{}\n", "<|vision_start|>")
    # model_type of the config -> class of transformers
    models: ClassVar[dict[str, str]] = {
        "qwen2_vl": "Qwen2VLForConditionalGeneration",
        "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    }

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        prompt: ChatPrompt,
        pixels: PixelConfig,
        identity: BackboneIdentity,
    ) -> None:
        """Wrap a loaded model.

        Raises:
            ModelError: an internal of transformers that this adapter relies on has moved.
        """
        with guard_internals(model):
            self._visual = model.model.visual
        super().__init__(model, tokenizer, prompt, identity)
        self.frames_per_step = pixels.temporal_patch_size
        self.default_fps = float(getattr(model.config, "protokv_fps", _DEFAULT_FPS))
        self._pixels = pixels
        self.settings = pixels.settings(self.default_fps)
        # Qwen2-VL has one position per temporal patch, Qwen2.5-VL positions per second.
        self._tokens_per_second: float | None = getattr(model.config.vision_config, "tokens_per_second", None)

    @classmethod
    def load(cls, path: str, name: str, config: Any, placement: Placement) -> Self:
        """Load weights, tokenizer, chat template and preprocessing of a folder."""
        import transformers

        with guard_internals(transformers):
            kind = getattr(transformers, cls.models[config.model_type])
        model = load_model(kind, path, placement)
        tokenizer, template = load_tokenizer(path)
        prompt = ChatPrompt(tokenizer, VIDEO_TOKEN, template)
        return cls(model, tokenizer, prompt, cls.read_pixels(path), identify(path, name, config, placement))

    @staticmethod
    def read_pixels(path: str) -> PixelConfig:
        """Read how a folder prepares video frames.

        A file for video that transformers has saved repeats the limits of still images, so it is treated alike.
        """
        return PixelConfig.from_files(read_video_processor(path)[0]).for_video()

    def embed_steps(self, steps: Sequence[PreparedStep], times_s: Sequence[float]) -> list[StepTokens]:
        """Run temporal patches through the vision tower; it attends within each alone, so this is exact."""
        tokens = self._run_vision(steps).pooler_output.to(self.device)
        parts = tokens.split([prod(step.grid) for step in steps])
        return [StepTokens(part, step.grid) for part, step in zip(parts, steps, strict=True)]

    def _run_vision(self, steps: Sequence[PreparedStep]) -> Any:
        """Return the output of the vision tower for some steps in order."""
        merge = self._pixels.merge_size
        sizes = [[1, rows * merge, columns * merge] for rows, columns in (step.grid for step in steps)]
        patches = steps[0].pixels if len(steps) == 1 else torch.cat([step.pixels for step in steps])
        return self._visual(patches.to(self.device, self.dtype), grid_thw=torch.tensor(sizes, device=self.device))
