"""Qwen2-VL and Qwen2.5-VL as backbones: M-RoPE positions, temporal patches of two frames, PIL
preprocessing.

The vision tower, shared by later Qwen-VL families, takes flat patches and encodes each temporal
patch by itself. Positions are always passed explicitly: transformers' own index starts the text
after a video inside the video's time span.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor

from protokv.backbones.adapter import TransformersBackbone
from protokv.backbones.pixels import GridBackbone, PreprocessorConfig
from protokv.backbones.towers import make_tower_inputs, supports_varlen, use_varlen_attention
from protokv.core.backbone import PreparedStep
from protokv.texts import JsonObject, Keywords


class QwenVL(GridBackbone, TransformersBackbone):
    """Qwen2-VL or Qwen2.5-VL of any size."""

    position_components = 3
    video_token = "<|video_pad|>"
    usual_fps = 2.0
    # The whole video stands between two control tokens, so words close it and what follows opens
    # another.
    words_form: ClassVar[tuple[str, str, str]] = ("<|vision_end|>", "{}\n", "<|vision_start|>")

    def __init__(self, model: Any, *parts: Any) -> None:
        """Wrap a loaded model."""
        super().__init__(model, *parts)
        self._pixels: PreprocessorConfig = self._frames
        self._told: dict[tuple[tuple[int, int], ...], Keywords] = {}
        self.frames_per_step = self._pixels.temporal_patch_size
        self.settings = self._pixels.settings(self.default_fps)
        # Qwen2-VL has one position per temporal patch, Qwen2.5-VL positions per second.
        self._tokens_per_second: float | None = getattr(
            model.config.vision_config, "tokens_per_second", None
        )

    @classmethod
    def read_rate(cls, config: Any) -> tuple[int, float]:
        """Return the frames of a temporal patch, and the rate of the training."""
        return config.vision_config.temporal_patch_size, super().read_rate(config)[1]

    @staticmethod
    def make_frames(raw: JsonObject, of_video: bool) -> PreprocessorConfig:
        """Read how a folder prepares video frames; files for video repeat the limits of still
        images.
        """
        return PreprocessorConfig.from_files(raw).for_video()

    def name_pixels(self, step: PreparedStep) -> Keywords:
        """Return patches, and the grid of one temporal patch."""
        merge = self._pixels.merge_size
        grid = [1, *(side * merge for side in step.grid)]
        return {
            "token": self._model.config.video_token_id,
            "pixel_values_videos": self._join_pixels([step]),
            "video_grid_thw": torch.tensor([grid], device=self.device),
        }

    def look(self, steps: Sequence[PreparedStep]) -> Sequence[Tensor]:
        """Run temporal patches through the vision tower; it attends within each alone, so this is
        exact.
        """
        found: Sequence[Tensor] = self._run_vision(steps).pooler_output
        return found

    def _run_vision(self, steps: Sequence[PreparedStep]) -> Any:
        """Return the output of the vision tower for some steps in order."""
        merge = self._pixels.merge_size
        grids = tuple(step.grid for step in steps)
        tower = self._model.model.visual
        in_parts = supports_varlen(tower, self.device, self.dtype)
        if grids not in self._told:
            sizes = torch.tensor([[1, rows * merge, columns * merge] for rows, columns in grids])
            self._told[grids] = make_tower_inputs(tower, sizes, self.device, in_parts)
        with use_varlen_attention(tower) if in_parts else nullcontext():
            return self._model.get_video_features(self._join_pixels(steps), **self._told[grids])
