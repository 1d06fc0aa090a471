"""`InfiniPotV`: exact tokens, compressed to a share of the budget whenever the next step would exceed it.

Source: InfiniPot-V (Kim et al., NeurIPS 2025), arXiv 2506.15745, and its released code, the token-retention baseline of
the ProtoKV paper. The same: compression is continual, knows no question and no length of the video, and chooses in each
layer and KV head for itself; the recent steps stay whole; of what is kept, the share alpha (the recent steps included)
goes to the tokens least similar to the recent ones at the same place, by keys as cached, that is rotated (TaR), the
rest to the largest value norms (VaN); kept tokens stay in stream order at their positions. The pooling of value norms,
which the released script leaves off, is left out. What differs:

- The released code counts in frames of one size and compares token i of a frame with token i of the recent ones. After
  its first compression the survivors are no frames any more, and it cuts them into runs of one frame's length, so that
  places no longer match. Here places are matched by coordinates (`redundancy`), whatever has been dropped before.
- It compresses a block once it is full; here it happens when the next step would exceed the budget, so a question finds
  the memory as full as it can be. Steps may differ in length, and the budget need be no multiple of theirs.
- Ties keep the newer token. A token without a recent counterpart has similarity 0.

A step that does not fit behind |C| tokens makes the compression keep fewer. Of a step larger than the budget the last
tokens stay and everything else is forgotten, as in `near`.

Temporal redundancy: how much keys resemble those of recent steps at the same place of the image.

Owns the match of tokens by their coordinates and the mean cosine similarity. A spatial slot is a pair of equal
coordinates, so steps of another grid have other slots, tokens that are missing leave no gap, and text around a step,
which stands at (0.5, 0.5), is one slot, together with the middle cell where a grid has one. Knows no memory and no
budget.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from protokv.baselines.kept import CompressedMemory


class InfiniPotV(CompressedMemory):
    """At most M tokens a layer and KV head; a compression keeps |C| of them."""

    def _compress(self, keep: int) -> None:
        """Keep this many tokens, fewer than are held.

        1. The recent steps stay whole.
        2. Of the older tokens, those least similar to the recent ones at their place (TaR).
        3. Of the others, those with the largest value norms (VaN), until `keep` are chosen.
        """
        kept = self._kept
        held, recent_steps = len(kept), self._recent_steps(keep)
        recent = sum(recent_steps)
        older = held - recent
        by_norm = round((1 - self._config.redundancy_share) * keep)
        by_redundancy = max(0, keep - by_norm - recent)
        slots = RecentSlots.of(kept.coordinates[0, 0, older:held])
        H, device = self._shape.kv_heads, kept.step.device
        newest, heads = torch.arange(older, held, device=device).expand(H, -1), torch.arange(H, device=device)[:, None]
        parts = (kept.keys, kept.values, kept.positions, kept.coordinates, kept.step)
        # Layer by layer: scores are float32, and all layers at once would take several times the bytes of the memory.
        for keys, values, positions, coordinates, step in zip(*parts, strict=True):
            cached = keys[:, :held].float()
            similarity = slots.similarity(cached[:, :older], coordinates[:, :older], cached[:, older:])
            chosen = _best(-similarity, by_redundancy)
            norm = values[:, :older].float().norm(dim=-1).masked_fill_(chosen, -torch.inf)
            chosen |= _best(norm, keep - recent - by_redundancy)
            # In stream order, as `nonzero` is.
            index = torch.cat((chosen.nonzero()[:, 1].view(H, keep - recent), newest), 1)
            for part in (keys, values, positions, coordinates, step):
                part[:, :keep] = part[heads, index]
        kept.cut(keep, recent_steps)

    def _recent_steps(self, keep: int) -> list[int]:
        """Tokens of the near steps that stay whole, oldest first: the newest, and more within the recent share."""
        limit = min(keep, int(self._config.recent_share * len(self._kept)))
        recent: list[int] = []
        for tokens in reversed(self._kept.lengths):
            if sum(recent) + tokens > (limit if recent else keep):
                break
            recent.insert(0, tokens)
        return recent


def _best(score: Tensor, n: int) -> Tensor:
    """Which n of each row `[H, N]` have the highest scores, `[H, N]` bool; of equal ones the later."""
    order = score.flip(-1).argsort(dim=-1, descending=True, stable=True)[:, :n]
    return torch.zeros_like(score, dtype=torch.bool).scatter_(1, score.shape[1] - 1 - order, True)


@dataclass(frozen=True, slots=True)
class RecentSlots:
    """The spatial slots of R recent tokens; the same for all layers and heads.

    Attributes:
        codes: `[S]` int64, one number for each pair of coordinates, ascending.
        counts: `[S]` int64, recent tokens in the slot.
        rounds: pairs (slots, tokens): the first recent token of every slot, then the second of those that have one, and
            so on. In a round no slot occurs twice, so that adding it is deterministic on every device.
    """

    codes: Tensor
    counts: Tensor
    rounds: list[tuple[Tensor, Tensor]]

    @staticmethod
    def of(coordinates: Tensor) -> RecentSlots:
        """The slots of recent tokens at `coordinates` `[R, 2]` float32."""
        codes, slot, counts = torch.unique(_codes(coordinates), return_inverse=True, return_counts=True)
        order = slot.argsort(stable=True)
        begin = counts.cumsum(0) - counts
        occurrence = torch.arange(len(order), device=order.device) - begin[slot[order]]
        rounds = []
        for n in range(int(counts.max()) if len(counts) else 0):
            tokens = order[occurrence == n]
            rounds.append((slot[tokens], tokens))
        return RecentSlots(codes, counts, rounds)

    def similarity(self, keys: Tensor, coordinates: Tensor, recent: Tensor) -> Tensor:
        """Mean cosine similarity of each key to the recent ones in its slot, 0 where the slot has none.

        The mean of cosines is the product with the mean of unit vectors, so the cost does not grow with the number of
        recent steps.

        Args:
            keys: `[H, N, D]` float32.
            coordinates: `[H, N, 2]` float32.
            recent: `[H, R, D]` float32, keys of the recent tokens.

        Returns:
            `[H, N]` float32 in [-1, 1].
        """
        H, N, D = keys.shape
        S = len(self.codes)
        if not S:
            return keys.new_zeros(H, N)
        units, mean = normalize(recent, dim=-1), keys.new_zeros(H, S, D)
        for slots, tokens in self.rounds:
            mean[:, slots] += units[:, tokens]
        mean /= self.counts[:, None]
        codes = _codes(coordinates)
        slot = torch.searchsorted(self.codes, codes).clamp_(max=S - 1)
        head = torch.arange(H, device=keys.device)[:, None]
        # Whole rows by their number: `gather` would look up every component.
        there = mean.view(H * S, D).index_select(0, (slot + head * S).view(-1)).view(H, N, D)
        cosine: Tensor = there.mul_(keys).sum(-1) / keys.norm(dim=-1).clamp_min(1e-12)
        return cosine.masked_fill_(self.codes[slot] != codes, 0.0)


def _codes(coordinates: Tensor) -> Tensor:
    """One int64 for each pair of coordinates `[..., 2]` float32, equal where both are equal."""
    # Adding 0.0 makes -0.0, which equals 0.0, the same bits.
    bits = (coordinates + 0.0).view(torch.int32).long()
    return bits[..., 0] << 32 | bits[..., 1] & 0xFFFFFFFF
