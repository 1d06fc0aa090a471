"""Which pseudo-tokens stand in which far slots of the context: `Layout`, and the shares it is dealt out by.

The K * S far slots of a head are dealt out to its prototypes in order: S to each (`allocation="fixed"`), or in
proportion to the variance of their residuals (`by_variance`; the paper's appendix on dynamic allocation). Owns whole
numbers of slots and nothing that stands in them. A layout is a function of the state alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Variances are taken in units of 2**-31 of the head's largest: shares are then whole numbers on any device.
_UNIT = 2.0**31


@dataclass(slots=True)
class Layout:
    """Where the pseudo-tokens of each prototype stand, flat over `B = L * H` heads; N = K * S far slots.

    Attributes:
        counts: `[B, K]` int64, S_k.
        start: `[B, K]` int64, the first slot of each; the others follow it.
        owner: `[B, N]` int64, the prototype whose slot it is; K where it is nobody's.
    """

    counts: Tensor
    start: Tensor
    owner: Tensor

    @classmethod
    def fixed(cls, heads: int, prototypes: int, pseudo_tokens: int, device: torch.device) -> Layout:
        """S slots for every prototype, in use or not."""
        B, K, S = heads, prototypes, pseudo_tokens
        counts = torch.full((B, K), S, dtype=torch.int64, device=device)
        owner = torch.arange(K, device=device).repeat_interleave(S).repeat(B, 1)
        return cls(counts, counts.cumsum(1) - counts, owner)

    def deal_(self, heads: Tensor, counts: Tensor) -> None:
        """Deal out the slots of `heads` `[n]` anew, `counts` `[n, K]` to each prototype."""
        end = counts.cumsum(1)
        slots = torch.arange(self.owner.shape[1], device=counts.device).expand(len(heads), -1).contiguous()
        self.counts[heads], self.start[heads] = counts, end - counts
        self.owner[heads] = torch.searchsorted(end, slots, right=True)

    def slots_of(self, rows: Tensor, *, equal: bool = False) -> Iterator[tuple[Tensor | slice, Tensor, Tensor | None]]:
        """The slots of prototypes `rows` `[n]`, flat over `B * K`, in batches of those with about as many.

        Yields:
            part `[m]`, indices into `rows`; slots `[m, s]`, theirs in their head; shown `[m, s]` bool, whether a
            prototype has that many. Where all have `equal` numbers of slots it is one batch, without `shown`, and
            nothing is asked of the device.
        """
        start = self.start.view(-1)[rows]
        if equal:
            place = torch.arange(self.owner.shape[1] // max(self.counts.shape[1], 1), device=rows.device)
            yield slice(None), start[:, None] + place, None
            return
        counts = self.counts.view(-1)[rows]
        # At most twice as many as needed: counts in (2**(b - 1), 2**b] go together.
        level = torch.frexp((counts - 1).double()).exponent.masked_fill_(counts == 0, -1)
        for b in sorted(set(level[counts > 0].tolist())):
            part = (level == b).nonzero().squeeze(1)
            place = torch.arange(int(counts[part].max()), device=rows.device)
            yield part, start[part, None] + place, place < counts[part, None]


def by_variance(variance: Tensor, alive: Tensor, slots: int) -> Tensor:
    """S_k of each prototype: its share of all slots in proportion to its variance, at least 1 while it is alive.

    The paper's S_k = S_tot Var(H_k) / sum_j Var(H_j). Left open there and settled here: who would get less than one
    slot gets one, and the others share what is then left; fractions go by largest remainder, ties to the lower index.
    Where no prototype has any variance each gets one slot and the rest stay empty.

    Args:
        variance: `[n, K]` float64, not negative.
        alive: `[n, K]` bool.
        slots: S_tot, at least K.

    Returns:
        `[n, K]` int64; each row adds up to `slots` unless all its variances are 0.
    """
    K = variance.shape[1]
    variance = variance.masked_fill(~alive, 0.0)
    largest = variance.amax(1, keepdim=True) if K else variance
    weight = torch.where(largest > 0, variance / largest * _UNIT, 0.0).round().long()

    # In order of weight: the first t who are alive have one slot each when those above them would leave them less.
    ordered, order = weight.masked_fill(~alive, -1).sort(dim=1, stable=True)
    lower = torch.arange(K, device=weight.device) - (~alive).sum(1, keepdim=True)
    rest = ordered.clamp(min=0).flip(1).cumsum(1).flip(1)
    shares = torch.zeros_like(alive).scatter_(1, order, (ordered > 0) & (ordered * (slots - lower) >= rest))

    weight = weight.masked_fill(~shares, 0)
    total = weight.sum(1, keepdim=True).clamp(min=1)
    left = slots - (alive & ~shares).sum(1, keepdim=True)
    whole, remainder = left * weight // total, left * weight % total
    rank = remainder.masked_fill(~shares, -1).argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    whole += shares & (rank < left - whole.sum(1, keepdim=True))
    return torch.where(shares, whole, alive.long())
