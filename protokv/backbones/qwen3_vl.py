"""Qwen3-VL and Qwen3.5 as backbones: a step begins with its time as text, and may feed the first
layers.

A step has the form of transformers' processor for one temporal patch: `<0.2
seconds><|vision_start|>...<|vision_end|>`, with the mean time of its frames. This text belongs to
the step: a memory holds it like the rest. Positions are those of `get_rope_index`: text advances
all components, visual tokens stand at the next position plus their row and column, and later tokens
after the highest of these. DeepStack's features are added to the visual tokens after each of the
first layers while their own step is forwarded, and to no other token, so a stream equals the whole
video. The chat template puts a pair of vision tokens around the video: it ends the prefix and
begins the suffix.

The processor bounds the pixels of all frames of a video together, which a stream cannot (`pixels`
says which limits it has instead): with the published files, a video has smaller frames in
transformers from the 33rd full frame on.

In Qwen3.5, without DeepStack, three of four layers are gated delta nets, linear attention with a
recurrent state and a short convolution; transformers' own code runs them on the states of
`core.layers`. The others have full attention with gated outputs, rotate a part of each key by
interleaved M-RoPE, and serve a memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from protokv.backbones.pixels import MOST_FRAME_TOKENS, PreprocessorConfig, make_grid_positions
from protokv.backbones.qwen_vl import QwenVL
from protokv.core.backbone import Backbone, PreparedStep
from protokv.core.step import StepPositions, StepTokens, StreamClock
from protokv.texts import JsonObject

# Defaults of the family's video processor.
_PIXELS = {"patch_size": 16, "image_mean": (0.5, 0.5, 0.5), "image_std": (0.5, 0.5, 0.5)}
# Pixels of all frames of a video together, in the published files.
_TOTAL_PIXELS = {"shortest_edge": 4096, "longest_edge": 25_165_824}


class Qwen3VL(QwenVL):
    """Qwen3-VL or Qwen3.5 of any size, dense or mixture of experts."""

    moving = (0, 1, 2)
    words_form: ClassVar[tuple[str, str, str]] = ("", "{}\n", "")

    @staticmethod
    def make_frames(raw: JsonObject, of_video: bool) -> PreprocessorConfig:
        """Read how a folder prepares video frames: its limits for a video of one step, and those of
        a frame.
        """
        pixels = PreprocessorConfig.from_files(
            _PIXELS | {key: value for key, value in raw.items() if key != "size"}
        )
        total = _TOTAL_PIXELS | (raw.get("size") or {} if of_video else {})
        frames = pixels.temporal_patch_size
        token = pixels.token_side**2
        most = min(
            raw.get("max_video_tokens", MOST_FRAME_TOKENS) * token, total["longest_edge"] // frames
        )
        return replace(
            pixels, min_pixels=total["shortest_edge"] // frames, max_pixels=most
        ).for_video()

    def frame_texts(self, time_s: float) -> tuple[str, str]:
        """Return the time of a step, and vision tokens."""
        return f"<{time_s:.1f} seconds><|vision_start|>", "<|vision_end|>"

    def embed_steps(
        self, steps: Sequence[PreparedStep], times_s: Sequence[float]
    ) -> list[StepTokens]:
        """Return each step's visual tokens between its texts, and its features for the first
        layers.
        """
        output = self._run_tower(self._run_vision, steps)
        tokens = self._frame(output.pooler_output, steps, times_s)
        fed = getattr(output, "deepstack_features", None)
        if not fed:
            return tokens
        deep = [torch.stack([one.to(self.device) for one in own]) for own in zip(*fed, strict=True)]
        return [replace(one, deepstack=own) for one, own in zip(tokens, deep, strict=True)]

    def step_positions(
        self, tokens: StepTokens, *, origin: int, start: int, index: int, time_s: float
    ) -> StepPositions:
        """Return one position per text token; visual tokens stand at the next position plus (0,
        row, column).
        """
        assert tokens.visual is not None
        before = tokens.visual.start
        after = len(tokens.embeddings) - tokens.visual.stop
        seen = start + before + make_grid_positions(tokens.grid, 0, self.device)
        end = start + before + max(tokens.grid)
        places = torch.cat(
            (self.text_positions(start, before), seen, self.text_positions(end, after))
        )
        # The mark behind the pictures stands above them in every component.
        last = end + after - 1
        return StepPositions(places, (last, last, last))

    def time_within(
        self, passed: Tensor, positions: Tensor, seconds: Tensor, clock: StreamClock
    ) -> Tensor:
        """Return times in proportion: every token of a step advances all components."""
        return Backbone.time_within(self, passed, positions, seconds, clock)
