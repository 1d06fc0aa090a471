"""`VarianceLayout`: pseudo-tokens in proportion to the variance of each prototype's residuals
(`allocation="variance"`).

The paper's appendix on dynamic allocation, as a `Layout` of `protokv.core.prototypes`: the K * S far slots of a head
are given to its prototypes in order. A layout is a function of the state alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from protokv.core.bank import PrototypeBank
from protokv.core.near import Slots
from protokv.core.prototypes import LAYOUTS, Layout
from protokv.core.tensors import size_of
from protokv.memories.paper.residuals import Residuals

# Variances are taken in units of 2**-31 of the head's largest: shares are then whole numbers on any device.
_UNIT = 2.0**31


class VarianceLayout(Layout):
    """Gives prototype k a number S_k of slots by the variance of its residuals.

    Attributes:
        counts: `[B, K]` int64, S_k.
        owner: `[B, K * S]` int64, the prototype of each far slot; K if the slot is free.
    """

    def __init__(self, slots: Slots, prototypes: int, pseudo_tokens: int) -> None:
        super().__init__(slots, prototypes, pseudo_tokens)
        L, H, N, _ = slots.keys.shape
        device = slots.keys.device
        self.counts = torch.full((L * H, prototypes), pseudo_tokens, device=device)
        self.owner = torch.arange(prototypes, device=device).repeat_interleave(pseudo_tokens).repeat(L * H, 1)
        # The first slot of each prototype; its other slots follow.
        self._first = self._places[:, 0].clone().view(L * H, prototypes)
        self._head = N * torch.arange(L * H, device=device)[:, None] + slots.far.start

    def deal_(self, rows: Tensor, bank: PrototypeBank, residuals: Residuals | None) -> Tensor:
        """Assign the slots of heads that changed; return the rows to write: all of a head if its slots moved."""
        assert residuals is not None
        mass = bank.mass.flatten(0, 1)
        K = mass.shape[1]
        heads = torch.unique(rows // K)
        counts = by_variance(variances(residuals, heads), mass[heads] > 0, self.owner.shape[1])
        changed = (counts != self.counts[heads]).any(1)
        heads, counts = heads[changed], counts[changed]
        self.set_(heads, counts)
        # Clear free slots: a context is a function of the state alone.
        head, slot = (self.owner[heads] == K).nonzero(as_tuple=True)
        for held in (self._slots.keys, self._slots.values):
            held[:, :, self._slots.far].flatten(0, 1)[heads[head], slot] = 0.0
        every = heads[:, None] * K + torch.arange(K, device=heads.device)
        written: Tensor = torch.unique(torch.cat((rows, every.view(-1))))
        return written

    def set_(self, heads: Tensor, counts: Tensor) -> None:
        """Give the prototypes of `heads` `[n]` `counts` `[n, K]` slots."""
        end = counts.cumsum(1)
        slots = torch.arange(self.owner.shape[1], device=counts.device).expand(len(heads), -1).contiguous()
        self.counts[heads], self._first[heads] = counts, self._head[heads] + end - counts
        self.owner[heads] = torch.searchsorted(end, slots, right=True)

    def places_of(self, rows: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Yield prototypes in batches of similar slot counts: the largest is at most twice the smallest."""
        counts = self.counts.view(-1)[rows]
        # Counts in (2**(b - 1), 2**b] go together.
        level = torch.frexp((counts - 1).double()).exponent.masked_fill_(counts == 0, -1)
        for b in sorted(set(level[counts > 0].tolist())):
            part = (level == b).nonzero().squeeze(1)
            place = torch.arange(int(counts[part].max()), device=rows.device)
            first = self._first.view(-1)[rows[part]]
            yield rows[part], first[:, None] + place, place < counts[part, None]

    def spread(self, held: Tensor, empty: float) -> Tensor:
        """Return for each far slot the entry of its prototype in `held` `[B, K, ...]`; `empty` for a free slot."""
        nobody = torch.full_like(held[:, :1], empty)
        owner = self.owner.view(*self.owner.shape, *[1] * (held.ndim - 2)).expand(-1, -1, *held.shape[2:])
        return torch.cat((held, nobody), 1).gather(1, owner)

    def nbytes(self) -> int:
        """Return its bytes."""
        return super().nbytes() + size_of(self.owner, self._first)


LAYOUTS["variance"] = VarianceLayout


def variances(residuals: Residuals, heads: Tensor) -> Tensor:
    """Return Var(H_k) of all prototypes of `heads` `[n]`, flat over `L * H`: `[n, K]` float64.

    The paper leaves its form open. Here it is the mean squared distance of the counted residuals from their mean, with
    each residual read as its codeword, added up over keys, values and subspaces. It is computed as half the mean
    squared distance of pairs, which is exactly 0 if all residuals are equal. It is 0 without updates.
    """
    counts = [held.flatten(0, 1)[heads] for held in residuals.counts.values()]
    if len(counts) == 1:
        counts = [counts[0].sum(4), counts[0].sum(3)]
    updates = residuals.updates.flatten(0, 1)[heads].double().clamp(min=1)
    total = torch.zeros_like(updates)
    for count, codebook in zip(counts, (residuals.key_codebook, residuals.value_codebook), strict=True):
        words = codebook.flatten(0, 1)[heads].double()
        apart = (words[:, :, :, None] - words[:, :, None]).square().sum(4)
        share = count.double().transpose(1, 2)
        total += (share @ apart * share).sum((1, 3))
    return total / (2 * updates.square())


def by_variance(variance: Tensor, alive: Tensor, slots: int) -> Tensor:
    """Return S_k: the share of all slots in proportion to a prototype's variance, at least 1 while it is alive.

    The paper has S_k = S_tot Var(H_k) / sum_j Var(H_j) and leaves the rounding open. Here a prototype that would get
    less than one slot gets one, and the others share the rest; fractions go by largest remainder, ties to the lower
    index. If no prototype has any variance, each gets one slot and the rest stay empty.

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

    # In order of weight: the lightest living prototypes get one slot each if their share would be less.
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
