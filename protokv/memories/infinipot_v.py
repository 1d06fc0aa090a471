"""`InfiniPotV`: exact tokens, compressed to a share of the budget when the next step would exceed
it.

Source: InfiniPot-V (Kim et al., NeurIPS 2025), arXiv 2506.15745, and its released code: the
token-retention baseline of the ProtoKV paper. The same: compression is continual, knows neither the
question nor the length of the video, and chooses in each layer and KV head separately. The recent
steps stay whole. Of the kept tokens, the share alpha (with the recent steps) is least similar to
the recent tokens at the same place, by rotated keys (TaR); the rest has the largest value norms
(VaN). Kept tokens stay in stream order at their positions. What differs:

- The released code compares token i of a frame with token i of the recent frames. After its first
  compression it cuts the surviving tokens into runs of a frame's length, so places no longer match.
  Here coordinates match them.
- It compresses a block once the block is full. Here a compression happens when the next step would
  exceed the budget, so a question finds the memory as full as possible. Steps may differ in length,
  and the budget may be any number.
- Ties keep the newer token. A token without a recent counterpart has similarity 0.
- The pooling of value norms, which the released script turns off, is left out.

If a step does not fit after |C| tokens, the compression keeps fewer. Of a step larger than the
budget, the last tokens stay and everything else is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from protokv.core.settings import ShareSetting
from protokv.device.arrays import add_rows_
from protokv.memories.compressed import (
    KVCompressionConfig,
    KVCompressionMemory,
    mark_highest_scores,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InfiniPotVConfig(KVCompressionConfig):
    """InfiniPot-V.

    Attributes:
        redundancy_share: alpha, fraction of the kept tokens that temporal redundancy chooses, the
            recent steps included; the value norm chooses the others.
        recent_share: largest fraction of the tokens at a compression that counts as recent steps.
            Recent steps are kept whole, and older tokens are compared with them. The newest step is
            always recent. 0.25 is the released code's default; with kept_share = 0.75 it means
            exactly the steps since the last compression. The ProtoKV paper says gamma = 0.125 "as
            in the original work"; the released code does not have that figure, so the code decides.
    """

    name: ClassVar[str] = "infinipot-v"

    redundancy_share: ShareSetting = 0.5
    recent_share: ShareSetting = 0.25


class InfiniPotV(KVCompressionMemory[InfiniPotVConfig]):
    """At most M tokens per layer and KV head; a compression keeps |C| of them."""

    def _compress(self, keep: int) -> None:
        """Keep `keep` tokens.

        1. Keep the recent steps whole.
        2. Of the older tokens, keep those least similar to the recent tokens at the same place
        (TaR).
        3. Of the others, keep those with the largest value norms (VaN), until `keep` are chosen.
        """
        kept = self.kept
        held = len(kept)
        recent_steps = self._recent_steps(keep)
        recent = sum(recent_steps)
        older = held - recent
        by_norm = round((1 - self._config.redundancy_share) * keep)
        by_redundancy = max(0, keep - by_norm - recent)
        H = self._shape.kv_heads
        device = kept.step.device
        newest = torch.arange(older, held, device=device).expand(H, -1)
        # Layer by layer: float32 scores of all layers would take several times the bytes of the
        # memory.
        stays = []
        for keys, values, coordinates in zip(kept.keys, kept.values, kept.coordinates, strict=True):
            cached = keys[:, :held].float()
            similarity = _measure_redundancy(
                cached[:, :older],
                coordinates[:, :older],
                cached[:, older:],
                coordinates[0, older:held],
            )
            chosen = mark_highest_scores(-similarity, by_redundancy)
            norm = values[:, :older].float().norm(dim=-1)
            chosen |= mark_highest_scores(
                norm.masked_fill_(chosen, -torch.inf), keep - recent - by_redundancy
            )
            # `nonzero` gives stream order.
            older_kept = chosen.nonzero()[:, 1].view(H, keep - recent)
            stays.append(torch.cat((older_kept, newest), 1))
        kept.keep_(torch.stack(stays), recent_steps)

    def _recent_steps(self, keep: int) -> list[int]:
        """Return the lengths of the near steps that stay whole, oldest first: the newest step, and
        more if they fit.
        """
        limit = min(keep, int(self._config.recent_share * len(self.kept)))
        recent: list[int] = []
        for tokens in reversed(self.kept.lengths):
            if sum(recent) + tokens > (limit if recent else keep):
                break
            recent.insert(0, tokens)
        return recent


def _measure_redundancy(
    keys: Tensor, coordinates: Tensor, recent: Tensor, recent_coordinates: Tensor
) -> Tensor:
    """Return the mean cosine similarity of keys to recent ones at equal coordinates, `[H, N]` in
    [-1, 1]; 0 without.

    Keys `[H, N, D]` stand at `[H, N, 2]`, recent ones `[H, R, D]` at `[R, 2]`, the same for all
    heads; all are float32. The mean of cosines equals the product with the mean unit vector, so the
    cost does not grow with the recent steps.
    """
    H, N, D = keys.shape
    known, slot, counts = torch.unique(
        _codes(recent_coordinates), return_inverse=True, return_counts=True
    )
    S = len(known)
    if not S:
        return keys.new_zeros(H, N)
    head = torch.arange(H, device=keys.device)[:, None]
    mean = keys.new_zeros(H * S, D)
    add_rows_(mean, (slot + head * S).view(-1), normalize(recent, dim=-1).flatten(0, 1))
    mean /= counts.repeat(H)[:, None]
    codes = _codes(coordinates)
    slot = torch.searchsorted(known, codes).clamp_(max=S - 1)
    # `index_select` copies whole rows; `gather` would look up every component.
    there = mean.index_select(0, (slot + head * S).view(-1)).view(H, N, D)
    cosine: Tensor = there.mul_(keys).sum(-1) / keys.norm(dim=-1).clamp_min(1e-12)
    return cosine.masked_fill_(known[slot] != codes, 0.0)


def _codes(coordinates: Tensor) -> Tensor:
    """Encode each pair of coordinates `[..., 2]` float32 as one int64; equal pairs have equal
    codes.
    """
    bits = coordinates.view(torch.int32).long()
    return bits[..., 0] << 32 | bits[..., 1] & 0xFFFFFFFF


InfiniPotVConfig.memory = InfiniPotV
