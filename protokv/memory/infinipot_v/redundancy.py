"""Temporal redundancy: how much keys resemble those of recent steps at the same place of the image.

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
