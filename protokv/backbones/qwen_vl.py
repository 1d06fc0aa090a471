"""Qwen2-VL and Qwen2.5-VL as backbones: M-RoPE positions, temporal patches of two frames, PIL preprocessing.

Later Qwen-VL families share its vision tower `model.visual`, which takes flat patches and encodes each temporal patch
by itself. Positions are always passed explicitly, because transformers' own index starts the text after a video inside
the video's time span.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from protokv.backbones.adapter import Adapter, check_images, guard_internals
from protokv.backbones.base import StepPositions, StepTokens
from protokv.backbones.loading import identify, load_model, load_tokenizer
from protokv.backbones.pixels import PixelConfig, patchify
from protokv.backbones.placement import Placement
from protokv.backbones.processor_files import read_video_processor
from protokv.backbones.prompt import ChatPrompt
from protokv.records import BackboneIdentity

VIDEO_TOKEN = "<|video_pad|>"
DEFAULT_FPS = 2.0


class QwenVL(Adapter):
    """Qwen2-VL or Qwen2.5-VL of any size, the embedded model included."""

    position_components = 3
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
        self.default_fps = float(getattr(model.config, "protokv_fps", DEFAULT_FPS))
        self._pixels = pixels
        self.settings = {
            "frames_per_step": self.frames_per_step,
            "fps": self.default_fps,
            "min_pixels": pixels.min_pixels,
            "max_pixels": pixels.max_pixels,
        }
        # Qwen2-VL counts temporal patches, Qwen2.5-VL counts time.
        self._tokens_per_second: float | None = getattr(model.config.vision_config, "tokens_per_second", None)

    @classmethod
    def load(cls, path: str, name: str, config: Any, placement: Placement) -> Self:
        """Load weights, tokenizer, chat template and preprocessing of a folder or hub name."""
        import transformers

        with guard_internals(transformers):
            kind = getattr(transformers, cls.models[config.model_type])
        model = load_model(kind, path, placement)
        tokenizer, template = load_tokenizer(path)
        prompt = ChatPrompt(tokenizer, VIDEO_TOKEN, template)
        return cls(model, tokenizer, prompt, cls.read_pixels(path), identify(path, name, config, placement))

    @staticmethod
    def read_pixels(path: str) -> PixelConfig:
        """How a folder or hub repository prepares video frames.

        Where only an image preprocessor is there, its limits are those of still images (up to 12.8 million pixels): a
        frame of a video is then held to the limit of the family's video processor, 768 tokens.
        """
        raw, of_video = read_video_processor(path)
        pixels = PixelConfig.from_files(raw)
        limit = pixels.max_pixels if of_video else min(pixels.max_pixels, PixelConfig().max_pixels)
        return replace(pixels, max_pixels=limit)

    def embed_step(self, images: np.ndarray[Any, np.dtype[np.uint8]], time_s: float = 0.0) -> StepTokens:
        """One temporal patch through the vision tower; patches attend within it alone, so this is exact."""
        output, grid = self._see(images)
        return StepTokens(output.pooler_output.to(self.device), grid)

    def _see(self, images: np.ndarray[Any, np.dtype[np.uint8]]) -> tuple[Any, tuple[int, int]]:
        """What the vision tower makes of a step, and rows and columns of its tokens."""
        check_images(images, self.frames_per_step)
        patches, (rows, columns) = patchify(images, self._pixels)
        merge = self._pixels.merge_size
        grid = torch.tensor([[1, rows * merge, columns * merge]], device=self.device)
        return self._visual(patches.to(self.device, self.dtype), grid_thw=grid), (rows, columns)

    def step_positions(
        self, tokens: StepTokens, *, origin: int, start: int, index: int, time_s: float
    ) -> StepPositions:
        """(t, h, w) of every token: time or patches since the start, row, column, each from `origin`."""
        # The small term undoes the rounding of sums such as 3 * 0.1; transformers truncates likewise.
        per_second = self._tokens_per_second
        t = index if per_second is None else int(time_s * per_second + 1e-6)
        rows, columns = tokens.grid
        highest = (origin + t, origin + rows - 1, origin + columns - 1)
        return StepPositions(origin + self._grid_positions(tokens.grid, t), highest)

    def _grid_positions(self, grid: tuple[int, int], t: int) -> Tensor:
        """(t, row, column) of every visual token, `[rows * columns, 3]`."""
        rows, columns = grid
        cell = torch.arange(rows * columns, device=self.device)
        return torch.stack([torch.full_like(cell, t), cell // columns, cell % columns], dim=-1)
