"""`Hermes`: exact tokens; each layer keeps the ones that its band of the model ranks highest.

Source: HERMES (ACL 2026), github.com/haowei-freesky/HERMES; code read at gdace829/HERMES 5154d44,
`inference/llavaov_hermes.py`. The same: the shallow tenth of the layers ranks tokens by recency,
the deep three tenths by the attention of a fixed pseudo query, the layers between by both, with
more attention the deeper they are. Scores are spread to [0, 1] and smoothed with the scores of the
next layer. All heads of a layer keep the same tokens. Deep layers replace the dropped tokens by one
mean token, whose keys are first rotated to one position. What differs:

- The release compresses to the whole budget after every chunk of 16 frames and holds more in
  between. Here a compression happens when the next step would exceed the budget, and `kept_share`
  of the budget stays, the newest step whole.
- The release computes the attention of a probe in every layer from the probe's word embeddings,
  without the layers before (an audit calls that a bug). Here the session forwards the probe like a
  question, and the memory scores by the queries of that forward (`compact`). The probe's own tokens
  take no part in the softmax.
- A mean token stands at the position of the newest token that it replaces, not after all kept
  tokens.
- There is no lazy re-indexing: `positions="compact"` serves every memory.

Without probes, when no session serves the memory, all layers rank by recency.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from protokv.core.parts import PositionedStep, SessionListener, SessionView
from protokv.core.rotary import rerotate
from protokv.core.settings import ShareSetting
from protokv.errors import ConfigError
from protokv.memories.compressed import (
    KVCompressionConfig,
    KVCompressionMemory,
    mark_highest_scores,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HermesConfig(KVCompressionConfig):
    """HERMES.

    Attributes:
        shallow_share: fraction of the layers, from the first on, that rank by recency alone.
        deep_share: fraction of the layers, up to the last, that rank by attention alone and keep a
            summary token.
    """

    name: ClassVar[str] = "hermes"

    shallow_share: ShareSetting = 0.1
    deep_share: ShareSetting = 0.3

    def check(self) -> None:
        """Refuse bands that overlap."""
        if self.shallow_share + self.deep_share > 1:
            shares = f"{self.shallow_share} and {self.deep_share}"
            raise ConfigError(
                f"shallow_share and deep_share: expected at most 1 together, got {shares}"
            )

    def listeners(self) -> Sequence[SessionListener]:
        """Return the one that forwards the pseudo queries."""
        return (_ProbeListener(),)


class Hermes(KVCompressionMemory[HermesConfig]):
    """At most M tokens per layer; a compression keeps a share of them."""

    one_by_one = True
    undivided = "a layer's scores are smoothed with the next layer's"

    def probes_for(self, tokens: int) -> Sequence[str]:
        """Return the three pseudo queries if the step would exceed the budget."""
        return PROBE_TEXTS if len(self.kept) and self._exceeds(tokens) else ()

    def compact(self, queries: Sequence[Tensor], tokens: int) -> None:
        """Make room for a step of `tokens`, ranked by the attention of the pseudo queries."""
        kept = self.kept
        n = len(self.kept)
        P0 = self._shape.sink_tokens
        held = self._slots.context(kept.positions[0, 0, :0]).keys
        seen = []
        for layer in range(self._shape.layers):
            band, _ = _find_band(self._config, layer, self._shape.layers)
            # Prefix and kept tokens are neighbours in the slots.
            keys = held[layer, :, : P0 + n]
            seen.append(_measure_attention(queries[band][layer].to(keys.device), keys, P0))
        self._drop(seen, self._room_beside(tokens))

    def _compress(self, keep: int) -> None:
        """Drop the oldest tokens, without scores of the pseudo queries."""
        self._drop([None] * self._shape.layers, keep)

    def _drop(self, attention: Sequence[Tensor | None], keep: int) -> None:
        """Keep the `keep` tokens of each layer that `_rank` scores highest, and the newest step
        whole if it fits.
        """
        kept = self.kept
        n = len(self.kept)
        newest = kept.newest_within(keep)
        older = n - sum(newest)
        room = keep - sum(newest)
        newest_slots = torch.arange(older, n, device=kept.step.device)
        stays = []
        for layer, score in enumerate(_rank(self._config, attention, n, kept.step.device)):
            band, _ = _find_band(self._config, layer, self._shape.layers)
            summarised = band == _DEEP and room > 0
            (chosen,) = mark_highest_scores(score[None, :older], room - summarised)
            if summarised:
                chosen[self._summarise(layer, ~chosen)] = True
            index = torch.cat((chosen.nonzero().squeeze(1), newest_slots))
            stays.append(index.expand(self._shape.kv_heads, -1))
        kept.keep_(torch.stack(stays), newest)

    def _summarise(self, layer: int, dropped: Tensor) -> Tensor:
        """Put the mean of the tokens that are `dropped` `[n]` bool in place of the newest; return
        its slot `[1]`.
        """
        rows = dropped.nonzero().squeeze(1)
        last = rows[-1:]
        keys, values, positions, coordinates, _ = (part[layer] for part in self.kept.per_token)
        here = positions[:, rows]
        there = positions[:, last]
        moved = rerotate(keys[:, rows].float(), here, there.expand_as(here), self._rotary)
        keys[:, last] = moved.mean(1, keepdim=True).to(keys.dtype)
        values[:, last] = values[:, rows].float().mean(1, keepdim=True).to(values.dtype)
        coordinates[:, last] = coordinates[:, rows].mean(1, keepdim=True)
        return last


_LOCAL = (
    "Describe the current scene in detail, focusing on specific objects, fine-grained actions, and "
    "spatial "
    "relationships."
)
_GLOBAL = (
    "Summarize the video narrative, identifying main characters, key events, timeline changes, and "
    "the overall theme."
)
PROBE_TEXTS = (_LOCAL, f"{_LOCAL}; {_GLOBAL}", _GLOBAL)
"""The pseudo queries of the shallow, middle and deep layers, worded as in the released code."""

_SHALLOW, _MIDDLE, _DEEP = range(3)
_BAND_SMOOTHING = (0.1, 0.3, 0.4)
"""For each band, the share of the next layer's score in a layer's score."""
_STEEPEST = 20.0
_FLATTEST = 0.5


def _find_band(config: HermesConfig, layer: int, layers: int) -> tuple[int, float]:
    """Return the band of a layer and its depth inside the middle band, in [0, 1)."""
    first = int(layers * config.shallow_share)
    last = int(layers * (1 - config.deep_share))
    if layer < first:
        return _SHALLOW, 0.0
    if layer >= last:
        return _DEEP, 0.0
    return _MIDDLE, (layer - first) / (last - first)


def _measure_attention(queries: Tensor, keys: Tensor, n_sink: int) -> Tensor:
    """Return the attention of probe tokens to held tokens, `[n]` float32: the mean over query heads
    and probe tokens.

    `queries` are `[Hq, t, D]`; `keys` `[H, n_sink + n, D]` of the prompt prefix and of held tokens
    share the softmax.
    """
    H = keys.shape[0]
    D = keys.shape[2]
    folded = queries.float().reshape(H, -1, D)
    weights: Tensor = (folded @ keys.float().mT / D**0.5).softmax(-1)
    mean: Tensor = weights.mean((0, 1))
    return mean[n_sink:]


def _rank(
    config: HermesConfig, attention: Sequence[Tensor | None], n: int, device: torch.device
) -> list[Tensor]:
    """Score the `n` held tokens of every layer in stream order, `[n]` float32 each.

    `attention` has for each layer the result of `_measure_attention`, or None to rank by recency
    alone.
    """
    layers = len(attention)
    age = torch.arange(n - 1, -1, -1, device=device, dtype=torch.float32) / max(n - 1, 1)
    scores = []
    for layer, seen in enumerate(attention):
        band, progress = _find_band(config, layer, layers)
        recent_share = (1.0, 1.0 - 0.9 * progress, 0.0)[band] if seen is not None else 1.0
        steepness = _STEEPEST - (_STEEPEST - _FLATTEST) * progress
        score = recent_share * _spread(torch.exp(-steepness * age))
        scores.append(
            score if seen is None else score + (1 - recent_share) * _spread(seen.to(device))
        )
    for layer in range(layers - 2, -1, -1):
        share = _BAND_SMOOTHING[_find_band(config, layer, layers)[0]]
        scores[layer] = (1 - share) * scores[layer] + share * scores[layer + 1]
    return scores


def _spread(values: Tensor) -> Tensor:
    """Shift and scale values to [0, 1)."""
    if not len(values):
        return values
    low, high = values.aminmax()
    return (values - low) / (high - low + 1e-6)


class _ProbeListener(SessionListener):
    """Forwards the pseudo queries before a step that calls for a compression, as questions without
    an answer.
    """

    def before_append(self, session: SessionView, step: PositionedStep) -> None:
        """Let the memory make room for the step."""
        memory = session.memory
        assert isinstance(memory, Hermes)
        tokens = len(step.positions)
        if probes := memory.probes_for(tokens):
            memory.compact([_find_queries(session, text) for text in probes], tokens)


def _find_queries(session: SessionView, text: str) -> Tensor:
    """Return the queries `[L, Hq, t, D]` of a text after the video, at stream positions."""
    backbone = session.backbone
    placement = session.placement
    ids = backbone.suffix_ids(text)
    placed = placement.place(session.memory.context(), session.clock.next_position)
    start = placement.text_start(placed, session.clock)
    cache = session.cache.fork(placed)
    positions = backbone.text_positions(start, len(ids))
    cache.queries = []
    backbone.forward(backbone.embed_text(ids), positions, cache)
    queries = torch.stack([query.to(backbone.device) for query in cache.queries])
    if start == session.clock.next_position:
        return queries
    stream = backbone.text_positions(session.clock.next_position, len(ids))
    return rerotate(queries, positions, stream, backbone.precise_rotary)


HermesConfig.memory = Hermes
