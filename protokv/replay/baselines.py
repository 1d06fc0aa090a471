"""What stands beside every memory of a benchmark: the text alone, and the last 4 and 16 frames.

Four recent frames beat most memories where the evidence is recent (SimpleStream, arXiv 2604.02317), and many questions
need no video at all, so no number of a memory is shown without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from protokv.backbones.base import Backbone
from protokv.config import LastFramesConfig, SlidingWindowConfig
from protokv.replay.runner import Variant

FRAMES: Final = (4, 16)
TEXT_ONLY: Final = "text only"

# Beyond the largest frame that any processor keeps, so that a step has as many tokens as the model allows.
_LARGE: Final = 2048


def name_baselines(backbone: Backbone) -> list[Variant]:
    """The text alone, and the last frames at whatever budget these need."""
    tokens = measure_step(backbone)
    found = [Variant(TEXT_ONLY, SlidingWindowConfig(budget=1), blind=True)]
    for frames in FRAMES:
        steps = -(-frames // backbone.frames_per_step)
        # As SimpleStream has it: encoded anew for each question, right behind the prompt.
        config = LastFramesConfig(
            budget=steps * tokens, last_steps=steps, recent_frames=steps * backbone.frames_per_step, positions="compact"
        )
        found.append(Variant(f"last {frames} frames", config))
    return found


def with_baselines(variants: Sequence[Variant], backbone: Backbone) -> list[Variant]:
    """Memories and behind them the baselines that are not among them."""
    named = {variant.label for variant in variants}
    return [*variants, *(variant for variant in name_baselines(backbone) if variant.label not in named)]


@torch.inference_mode()
def measure_step(backbone: Backbone) -> int:
    """Tokens of the largest step that the model's preprocessing allows."""
    images = np.zeros((backbone.frames_per_step, _LARGE, _LARGE, 3), dtype=np.uint8)
    return len(backbone.embed_step(images).embeddings)
