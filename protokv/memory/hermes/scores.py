"""How HERMES ranks tokens: recency, attention, and both, layer by layer, smoothed from the last layer to the first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from protokv.config import HermesConfig

LOCAL: Final = (
    "Describe the current scene in detail, focusing on specific objects, fine-grained actions, and spatial "
    "relationships."
)
GLOBAL: Final = (
    "Summarize the video narrative, identifying main characters, key events, timeline changes, and the overall theme."
)
PROBES: Final = (LOCAL, f"{LOCAL}; {GLOBAL}", GLOBAL)
"""The pseudo queries of the shallow, middle and deep layers, as the released code words them."""

SHALLOW, MIDDLE, DEEP = range(3)
SMOOTHING: Final = (0.1, 0.3, 0.4)
"""Of each band, the share that the next layer's score has in a layer's own."""
STEEPEST, FLATTEST = 20.0, 0.5


def band_of(config: HermesConfig, layer: int, layers: int) -> tuple[int, float]:
    """The band of a layer, and how far it lies into the middle one, from 0 towards 1."""
    first, last = int(layers * config.shallow_share), int(layers * (1 - config.deep_share))
    if layer < first:
        return SHALLOW, 0.0
    if layer >= last:
        return DEEP, 0.0
    return MIDDLE, (layer - first) / (last - first)


def measure_attention(queries: Tensor, keys: Tensor, n_sink: int) -> Tensor:
    """Attention of probe tokens to the held ones, the mean over query heads and probe tokens, `[n]` float32.

    Args:
        queries: `[Hq, t, D]`, rotated.
        keys: `[H, n_sink + n, D]`, rotated: the prompt prefix and the held tokens, which share the softmax.
        n_sink: tokens of the prompt prefix.
    """
    H, D = keys.shape[0], keys.shape[2]
    folded = queries.float().reshape(H, -1, D)
    weights: Tensor = (folded @ keys.float().mT / D**0.5).softmax(-1)
    mean: Tensor = weights.mean((0, 1))
    return mean[n_sink:]


def rank(config: HermesConfig, attention: Sequence[Tensor | None], n: int, device: torch.device) -> list[Tensor]:
    """Scores of the `n` held tokens of every layer in stream order, `[n]` float32 each.

    Args:
        config: the bands.
        attention: of each layer, what `measure_attention` gave for the probe of its band; None: rank by recency alone.
        n: tokens held.
        device: of the scores.
    """
    layers = len(attention)
    age = torch.arange(n - 1, -1, -1, device=device, dtype=torch.float32) / max(n - 1, 1)
    scores = []
    for layer, seen in enumerate(attention):
        band, progress = band_of(config, layer, layers)
        recent_share = (1.0, 1.0 - 0.9 * progress, 0.0)[band] if seen is not None else 1.0
        steepness = STEEPEST - (STEEPEST - FLATTEST) * progress
        score = recent_share * _spread(torch.exp(-steepness * age))
        scores.append(score if seen is None else score + (1 - recent_share) * _spread(seen.to(device)))
    for layer in range(layers - 2, -1, -1):
        share = SMOOTHING[band_of(config, layer, layers)[0]]
        scores[layer] = (1 - share) * scores[layer] + share * scores[layer + 1]
    return scores


def _spread(values: Tensor) -> Tensor:
    """Values moved and scaled to [0, 1)."""
    if not len(values):
        return values
    low, high = values.aminmax()
    return (values - low) / (high - low + 1e-6)
