"""A family of transformers that is in no table: one frame a step, as its image processor and its
tower make it.

It serves a model whose tokens have one position, whose `get_image_features` takes the pixels of a
picture, and whose chat template shows a picture by one placeholder. The visual tokens of a frame
stand without marks around them. No test holds it to transformers' own forward, so it says that it
is not tested with the family.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from protokv.backbones.adapter import TransformersBackbone
from protokv.backbones.chat import PromptTemplate
from protokv.backbones.held import HeldModel
from protokv.core.backbone import PreparedStep
from protokv.core.step import Images
from protokv.errors import ModelError

# A still image may be cut into tiles; a frame of a video is one picture.
_WHOLE = {"do_image_splitting": False, "crop_to_patches": False, "do_pan_and_scan": False}


class GenericBackbone(TransformersBackbone):
    """Any model of pictures and text."""

    otherwise = "protokv.Cache serves it in Python: help(protokv.Cache)"
    _grid = (1, 1)
    read_decoder = HeldModel

    @classmethod
    def make_prompt(cls, config: Any, tokenizer: Any, template: str | None) -> PromptTemplate:
        """Return the prompt of a model whose chat template shows a picture."""
        return PromptTemplate(
            tokenizer, tokenizer.decode([config.image_token_id]), template, medium="image"
        )

    @classmethod
    def read_frames(cls, one: Any) -> Any:
        """Return the image processor."""
        from transformers import AutoImageProcessor

        return (
            AutoImageProcessor.from_pretrained(one, backend="pil")
            if isinstance(one, str)
            else one.image_processor
        )

    def __init__(self, model: Any, *parts: Any) -> None:
        """Wrap a loaded model, and look at a black frame to learn what a step costs. ModelError."""
        super().__init__(model, *parts)
        if self._decoder.position_components > 1:
            raise ModelError(
                f"{type(model).__name__} is not tested, and its tokens have "
                f"{self._decoder.position_components} positions each",
                hint=self.otherwise,
            )
        assert isinstance(self._decoder, HeldModel)
        self.rotated = self._decoder.rotated
        self.notice = f"not tested with {model.config.model_type}"
        with torch.inference_mode():
            step = self.prepare(np.zeros((1, 336, 336, 3), dtype=np.uint8))
            self._grid = (1, len(self.look([step])[0]))
        self.settings = {"frame_tokens": self._grid[1]}

    def prepare(self, images: Images) -> PreparedStep:
        """Prepare one frame, as the image processor has it."""
        whole = {name: value for name, value in _WHOLE.items() if hasattr(self._frames, name)}
        return PreparedStep(self._process(images, **whole)["pixel_values"].float(), self._grid)

    def look(self, steps: Sequence[PreparedStep]) -> Sequence[Tensor]:
        """Return what `get_image_features` makes of each frame, by itself."""
        each = [
            self._model.get_image_features(step.pixels.to(self.device, self.dtype))
            for step in steps
        ]
        return [torch.cat(list(getattr(one, "pooler_output", one))).flatten(0, -2) for one in each]
