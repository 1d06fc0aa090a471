"""`Hermes`: exact tokens, of which each layer keeps those that its band of the model ranks highest.

Source: HERMES (ACL 2026), github.com/haowei-freesky/HERMES; its code as read in gdace829/HERMES at 5154d44,
`inference/llavaov_hermes.py`. The same: the shallow tenth of the layers ranks by recency, the deep three tenths by the
attention of a fixed pseudo query, those between by both, more attention the deeper; scores are spread to [0, 1] and
smoothed with those of the next layer; all heads of a layer keep the same tokens; deep layers keep one mean token in
place of what they drop, its keys turned to one position first. What differs:

- The release compresses after every chunk of 16 frames and holds more than its budget in between. Here it happens when
  the next step would exceed the budget, which is never exceeded, and `kept_share` of it stays. The newest step stays
  whole.
- The release computes the attention of a probe with the embeddings of its words in every layer, without the layers
  before it (an audit calls that a bug). Here the session forwards the probe as it forwards a question, and the memory
  scores by the queries of that forward (`compact`). The probe's own tokens have no part in the softmax.
- A mean token stands where the newest token that it replaces stood, not behind all that is kept: the next step takes
  that place in the stream, in all layers alike.
- There is no lazy re-indexing: `positions="compact"` serves every memory.

Without probes, as in a memory that nobody asks for a session, all layers rank by recency.

How HERMES ranks tokens: recency, attention, and both, layer by layer, smoothed from the last layer to the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from protokv.baselines.kept import CompressedMemory
from protokv.config import HermesConfig
from protokv.core.rotary import rerotate


class Hermes(CompressedMemory):
    """At most M tokens a layer; a compression keeps a share of them."""

    joins_steps = False
    undivided = "a layer's scores are smoothed with the next layer's"

    def probes_for(self, tokens: int) -> Sequence[str]:
        """The three pseudo queries, where the step would exceed the budget."""
        return PROBES if len(self._kept) and self._exceeds(tokens) else ()

    def compact(self, queries: Sequence[Tensor], tokens: int) -> None:
        """Make room by what the pseudo queries attend to."""
        kept, n = self._kept, len(self._kept)
        P0 = self._slots.sink.stop
        seen = []
        for layer in range(self._shape.layers):
            band, _ = band_of(self._config, layer, self._shape.layers)
            # Prefix and kept tokens are neighbours in the slots.
            keys = self._slots.keys[layer, :, : P0 + n]
            seen.append(measure_attention(queries[band][layer].to(keys.device), keys, P0))
        self._drop(rank(self._config, seen, n, kept.step.device), self._room_beside(tokens))

    def _compress(self, keep: int) -> None:
        """Nobody made room with the pseudo queries: the oldest tokens are dropped."""
        none = [None] * self._shape.layers
        self._drop(rank(self._config, none, len(self._kept), self._kept.step.device), keep)

    def _drop(self, scores: Sequence[Tensor], keep: int) -> None:
        """Keep the highest of each layer, so many."""
        kept, n = self._kept, len(self._kept)
        newest = kept.lengths[-1] if kept.lengths and kept.lengths[-1] <= keep else 0
        older, room = n - newest, keep - newest
        tail = torch.arange(older, n, device=kept.step.device)
        for layer, score in enumerate(scores):
            band, _ = band_of(self._config, layer, self._shape.layers)
            summarised = band == DEEP and room > 0
            # Of equal scores the newer; in stream order.
            order = score[:older].flip(0).argsort(descending=True, stable=True)[: room - summarised]
            chosen = older - 1 - order
            if summarised:
                chosen = torch.cat((chosen, self._summarise(layer, older, chosen)))
            chosen = chosen.sort().values
            index = torch.cat((chosen, tail))
            for part in (kept.keys, kept.values, kept.positions, kept.coordinates, kept.step):
                part[layer, :, :keep] = part[layer][:, index]
        kept.cut(keep, [newest] if newest else [])

    def _summarise(self, layer: int, older: int, chosen: Tensor) -> Tensor:
        """Put the mean of the older tokens that are not chosen into the slot of the newest of them; return which."""
        kept = self._kept
        dropped = torch.ones(older, dtype=torch.bool, device=chosen.device)
        dropped[chosen] = False
        last = dropped.nonzero()[-1]
        keys, values = kept.keys[layer, :, :older][:, dropped], kept.values[layer, :, :older][:, dropped]
        here, there = kept.positions[layer, :, :older][:, dropped], kept.positions[layer][:, last]
        moved = rerotate(keys.float(), here, there.expand_as(here), self._rotary)
        kept.keys[layer, :, last] = moved.mean(1, keepdim=True).to(keys.dtype)
        kept.values[layer, :, last] = values.float().mean(1, keepdim=True).to(values.dtype)
        kept.coordinates[layer, :, last] = kept.coordinates[layer, :, :older][:, dropped].mean(1, keepdim=True)
        return last


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
