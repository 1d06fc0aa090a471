"""LLaVA-OneVision as a backbone: one frame per step, RoPE, a newline embedding after the whole video.

The only file that touches this model's internals: `model.get_video_features` (vision tower, projector and pooling) and
the embedding `model.image_newline`. transformers appends that embedding once, after all frames of a video. A stream
has no end, so here it begins the suffix of every question: the model reads it in the same place; no memory holds it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from protokv.backbones.adapter import Adapter, guard_internals
from protokv.backbones.chat import ChatPrompt
from protokv.backbones.files import read_video_processor
from protokv.backbones.loading import Placement, identify, load_model, load_tokenizer
from protokv.backbones.pixels import check_images, make_processor
from protokv.core.backbone import BackboneIdentity, PreparedStep, Turn
from protokv.core.context import Context
from protokv.core.step import StepTokens, StreamClock

# Appendix "Raw sequence length" of the paper: 0.5 frames per second and 196 tokens per frame.
_DEFAULT_FPS = 0.5
# Stands for the newline among token ids; no vocabulary has this id.
NEWLINE = -1


class LlavaOnevision(Adapter):
    """LLaVA-OneVision of any size, with the vision tower and the language model that its config names."""

    position_components = 1
    frames_per_step = 1
    words_form: ClassVar[tuple[str, str, str]] = ("\n", "{}\n", "")

    def __init__(self, model: Any, tokenizer: Any, prompt: ChatPrompt, frames: Any, identity: BackboneIdentity) -> None:
        """Wrap a loaded `LlavaOnevisionForConditionalGeneration`, with `frames` of `make_processor`.

        Raises:
            ModelError: an internal of transformers that this adapter relies on has moved.
        """
        super().__init__(model, tokenizer, prompt, identity)
        with guard_internals(model):
            self._video_features = model.model.get_video_features
            self._newline = model.model.image_newline
        vision, height, width = model.config.vision_config, frames.size["height"], frames.size["width"]
        self._frames = frames
        # Pooling halves the grid of patches and rounds up: 27 becomes 14.
        tokens = math.ceil(vision.image_size // vision.patch_size / 2) ** 2
        self._grid = (math.isqrt(tokens), math.isqrt(tokens))
        self.default_fps = float(getattr(model.config, "protokv_fps", _DEFAULT_FPS))
        self.settings = {"frame_height": height, "frame_width": width, "frame_tokens": tokens}

    @classmethod
    def load(cls, path: str, name: str, config: Any, placement: Placement) -> LlavaOnevision:
        """Load weights, tokenizer, chat template and preprocessing of a folder."""
        from transformers import LlavaOnevisionForConditionalGeneration

        model = load_model(LlavaOnevisionForConditionalGeneration, path, placement)
        tokenizer, template = load_tokenizer(path)
        prompt = ChatPrompt(tokenizer, tokenizer.convert_ids_to_tokens(config.video_token_id), template)
        frames = make_processor(read_video_processor(path)[0])
        return cls(model, tokenizer, prompt, frames, identify(path, name, config, placement))

    def suffix_ids(self, question: str, turns: Sequence[Turn] = ()) -> list[int]:
        """Return the newline after the video (`NEWLINE`) and the chat prompt after it."""
        return [NEWLINE, *super().suffix_ids(question, turns)]

    def words_ids(self, text: str) -> list[int]:
        """Return the newline after the video so far, and the words as a line."""
        ids = super().words_ids(text)
        return [NEWLINE, *ids] if ids else []

    def after_words(
        self, ids: list[int], context: Context, clock: StreamClock
    ) -> tuple[list[int], Context, StreamClock]:
        """Leave out the newline after the video, which stands in front of the words."""
        return super().after_words(ids[ids[0] == NEWLINE :], context, clock)

    def embed_text(self, ids: list[int]) -> Tensor:
        """Return `[n, E]`, with the model's newline embedding for `NEWLINE`."""
        embeddings = super().embed_text([max(token, 0) for token in ids])
        newline = torch.tensor(ids, device=self.device) == NEWLINE
        return torch.where(newline[:, None], self._newline.to(self.device), embeddings)

    def prepare(self, images: np.ndarray[Any, np.dtype[np.uint8]]) -> PreparedStep:
        """Prepare one frame, `[1, 3, height, width]`."""
        check_images(images, self.frames_per_step)
        pixels = self._frames(images=list(images), input_data_format="channels_last", return_tensors="pt")
        return PreparedStep(pixels["pixel_values"], self._grid)

    def embed_steps(self, steps: Sequence[PreparedStep], times_s: Sequence[float]) -> list[StepTokens]:
        """Run frames through vision tower, projector and pooling; they do not see each other there."""
        pixels = torch.cat([step.pixels for step in steps]).to(self.device, self.dtype)
        # The last feature is the newline.
        features = self._video_features(pixels[None]).pooler_output[0, :-1].to(self.device)
        return [StepTokens(one, self._grid) for one in features.chunk(len(steps))]
