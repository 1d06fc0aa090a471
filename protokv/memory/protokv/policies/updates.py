"""`Updates`: what tokens make of the prototypes that they choose, one after the other, without going through them.

Each token moves its prototype a share r of the way towards itself, so after the tokens j_1 < ... < j_m a centre is
(1 - r)^m c + sum_i r (1 - r)^(m - i) x_{j_i}: for all tokens of a block one product of a triangular matrix of weights
with the tokens. Sigma is such a sum of outer products. Owns this and what is written to the bank; knows nothing of how
prototypes are chosen (`assignment`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from protokv.config import PaperConfig
from protokv.memory.protokv.bank import PrototypeBank
from protokv.memory.protokv.policy import FarTokens


class Updates:
    """The prototypes `chosen` `[B, n]` by the `active` `[B, n]` ones of n tokens, after each of these.

    Attributes:
        chosen, active: as given.
        coordinates: of the tokens, `[n, 2]`.
        token: `[n]`, 0, 1, ...
        next: `[B, n]`, the next token that chose the same prototype; n where none did, -1 where a token is not active.
        first: `[B, K]`, the first token that chose a prototype; n where none did.
        keys: `[B, n, D]`, the key centre of its prototype right after a token.
        means, covariances: `[B, n, 2]` and `[B, n, 4]`, likewise.
    """

    def __init__(
        self,
        bank: PrototypeBank,
        tokens: FarTokens,
        part: slice,
        chosen: Tensor,
        active: Tensor,
        config: PaperConfig,
    ) -> None:
        self._bank, self._config = bank, config
        self._keys, self._values, self._seen = tokens.keys[:, part], tokens.values[:, part], tokens.seen.at(part)
        self.chosen, self.active, self.coordinates = chosen, active, self._seen.coordinates
        (B, n), K = chosen.shape, bank.mass.shape[2]
        self.token = torch.arange(n, device=chosen.device)
        self.rows = torch.arange(B, device=chosen.device)[:, None] * K + chosen
        # Tokens that are not active have chosen alone.
        mine = torch.where(active, chosen, -1 - self.token)
        self._same = mine[:, :, None] == mine[:, None]
        # In order of the prototype, each token stands before the next one that chose the same.
        ordered, order = mine.sort(dim=1, stable=True)
        following = torch.where(ordered[:, 1:] == ordered[:, :-1], order[:, 1:], n)
        self.next = torch.full_like(chosen, n).scatter_(1, order[:, :-1], following).masked_fill_(~active, -1)
        self.first = chosen.new_full((B, K), n)
        self.first.scatter_reduce_(1, chosen, torch.where(active, self.token, n), "amin")
        before = self._same.tril()
        # How many updates a prototype has had; and of each pair of these how many later one is, n + 1 where it is not.
        self._count = before.sum(2)
        self._later = (self._count[:, :, None] - self._count[:, None]).masked_fill_(~before, n + 1)
        self._weights: dict[float, tuple[Tensor, Tensor]] = {}
        self.keys = self._moved(bank.key_center, self._keys, config.key_rate)
        self.means = self._moved(bank.mean, self.coordinates.expand(B, -1, -1), config.spatial_rate)
        offset = self.coordinates - self.means
        outer = (offset[..., :, None] * offset[..., None, :]).flatten(2)
        self.covariances = self._moved(bank.covariance.flatten(3), outer, config.spatial_rate)

    def _moved(self, held: Tensor, given: Tensor, rate: float) -> Tensor:
        """A part of the prototypes `[L, H, K, F]` after each token, moved towards what these give, `[B, n, F]`."""
        if rate not in self._weights:
            n = len(self.token)
            kept = (1 - rate) ** torch.arange(n + 1, device=held.device, dtype=torch.float64)
            shares = torch.cat((rate * kept, kept.new_zeros(1))).float()
            weights = shares.index_select(0, self._later.view(-1)).view_as(self._later)
            self._weights[rate] = kept.float()[self._count][..., None], weights
        kept, weights = self._weights[rate]
        return torch.baddbmm(held.flatten(0, 2)[self.rows] * kept, weights, given)

    def write_(self, step: int) -> tuple[Tensor, Tensor]:
        """Move the prototypes in the bank; return keys and values `[B, n, D]` of the active tokens less their centres
        right after them, 0 elsewhere."""
        bank, active = self._bank, self.active
        values = self._moved(bank.value_center, self._values, self._config.value_rate)
        residuals = self._keys - self.keys, self._values - values
        # Everyone writes what the last one makes of its prototype. Those that are not active do as the first that is;
        # where none is, the row stays as it is.
        some = active.any(1, keepdim=True)
        leader = torch.where(active, self.token, active.int().argmax(1, keepdim=True))
        latest = torch.full_like(self.first, -1)
        latest.scatter_reduce_(1, self.chosen, torch.where(active, self.token, -1), "amax")
        last = latest.gather(1, self.chosen.gather(1, leader)).clamp_(min=0)
        rows = self.rows.gather(1, leader)
        mass = bank.mass.view(-1)
        mass.index_add_(0, self.rows.view(-1), active.long().view(-1))
        given = {
            "key_center": self.keys,
            "value_center": values,
            "mean": self.means,
            "covariance": self.covariances.view(*self.covariances.shape[:2], 2, 2),
            "last_step": torch.full_like(last, step),
            "position": self._positions(),
        }
        for name, new in given.items():
            held = getattr(bank, name).flatten(0, 2)
            place = last.view(*last.shape, *[1] * (new.ndim - 2)).expand(-1, -1, *new.shape[2:])
            settled = torch.where(some.view(-1, *[1] * (new.ndim - 1)), new.gather(1, place), held[rows])
            held.index_put_((rows,), settled)
        bank.touch_(rows.view(-1))
        return tuple(residual.masked_fill(~active[..., None], 0.0) for residual in residuals)  # type: ignore[return-value]

    def _positions(self) -> Tensor:
        """The anchor of its prototype, `[B, n, P]`, as it is after the last token; masses are up to date."""
        bank, seen = self._bank, self._seen.positions
        held = bank.position.flatten(0, 2)[self.rows]
        if self._config.anchor == "first":
            return held
        if self._config.anchor == "recent":
            return seen.expand_as(held).contiguous()
        # Sums of offsets, not of positions: these stay exact in float32 however long the stream is.
        offsets = torch.bmm(self._same.to(held.dtype), (seen - held) * self.active[..., None])
        return held + offsets / bank.mass.view(-1)[self.rows][..., None].clamp(min=1)
