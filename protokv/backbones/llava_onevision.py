"""LLaVA-OneVision as a backbone: one frame per step, RoPE, a newline embedding after the whole
video.

transformers appends the embedding `model.image_newline` once, after all frames of a video. A stream
has no end, so here it begins the suffix of every question: the model reads it in the same place; no
memory holds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any, ClassVar

import torch
from torch import Tensor

from protokv.backbones.adapter import TransformersBackbone
from protokv.backbones.chat import PromptTemplate
from protokv.core.backbone import ChatTurn, PreparedStep
from protokv.core.context import Context
from protokv.core.step import StreamClock

_NEWLINE = -1  # stands for the newline among token ids; no vocabulary has this id


class LlavaOnevision(TransformersBackbone):
    """LLaVA-OneVision of any size, with the vision tower and the language model that its config
    names.
    """

    # appendix "Raw sequence length" of the paper: 0.5 frames per second and 196 tokens per frame
    usual_fps = 0.5
    words_form: ClassVar[tuple[str, str, str]] = ("\n", "{}\n", "")

    def __init__(self, model: Any, *parts: Any) -> None:
        """Wrap a loaded `LlavaOnevisionForConditionalGeneration`."""
        super().__init__(model, *parts)
        self._newline = model.model.image_newline
        vision = model.config.vision_config
        size = self._frames.size
        # Pooling halves the grid of patches and rounds up: 27 becomes 14.
        side = ceil(vision.image_size // vision.patch_size / 2)
        self._grid = (side, side)
        self.settings = {
            "frame_height": size["height"],
            "frame_width": size["width"],
            "frame_tokens": side**2,
        }

    @classmethod
    def make_prompt(cls, config: Any, tokenizer: Any, template: str | None) -> PromptTemplate:
        """Return the prompt of a model; its config says which token stands for the video."""
        return PromptTemplate(
            tokenizer, tokenizer.convert_ids_to_tokens(config.video_token_id), template
        )

    def suffix_ids(self, question: str, turns: Sequence[ChatTurn] = ()) -> list[int]:
        """Return the newline after the video (`_NEWLINE`) and the chat prompt after it."""
        return [_NEWLINE, *super().suffix_ids(question, turns)]

    def words_ids(self, text: str) -> list[int]:
        """Return the newline after the video so far, and the words as a line."""
        ids = super().words_ids(text)
        return [_NEWLINE, *ids] if ids else []

    def after_words(
        self, ids: list[int], context: Context, clock: StreamClock
    ) -> tuple[list[int], Context, StreamClock]:
        """Leave out the newline after the video, which stands in front of the words."""
        return super().after_words(ids[ids[0] == _NEWLINE :], context, clock)

    def embed_token(self, token: Tensor) -> Tensor:
        """Return `[n, E]`, with the model's newline embedding for `_NEWLINE`."""
        embeddings = super().embed_token(token.clamp(min=0))
        # An engine's client holds embeddings on the meta device, and ids on the CPU.
        device = embeddings.device
        newline = (token == _NEWLINE)[:, None].to(device)
        return torch.where(newline, self._newline.to(device), embeddings)

    def look(self, steps: Sequence[PreparedStep]) -> Sequence[Tensor]:
        """Run frames through vision tower, projector and pooling; they do not see each other
        there.
        """
        # The last feature is the newline.
        seen: Tensor = self._model.get_video_features(self._join_pixels(steps)[None]).pooler_output[
            0, :-1
        ]
        return seen.chunk(len(steps))
