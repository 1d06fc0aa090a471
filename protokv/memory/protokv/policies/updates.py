"""`Updates`: what tokens make of the prototypes that they choose, one after the other, without going through them.

Each token moves its prototype a share r of the way towards itself, so after the tokens j_1 < ... < j_m a centre is
(1 - r)^m c + sum_i r (1 - r)^(m - i) x_{j_i}: for all tokens of a block one product of a triangular matrix of weights
with the tokens. Sigma is such a sum of outer products. Tokens stand in order of their prototypes here, so that those of
one stand side by side and a weight depends on their distance alone. Owns this and what is written to the bank; knows
nothing of how prototypes are chosen (`assignment`).
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from protokv.config import PaperConfig
from protokv.memory.protokv.bank import PrototypeBank
from protokv.memory.protokv.policy import FarTokens
from protokv.memory.rows import write_rows_
from protokv.memory.sorting import sorted_from


class Updates:
    """The prototypes `chosen` `[B, n]` by the `active` `[B, n]` ones of n tokens, after each of these.

    What is in order of the prototypes, and of one prototype in order of the tokens, has places instead of tokens.
    Tokens that are not active stand behind all others; they leave alone what they have chosen.

    Attributes:
        chosen, active: as given.
        token: `[n]`, 0, 1, ...
        order: `[B, n]`, the token at a place.
        prototype: `[B, n]`, what it has chosen.
        next: `[B, n]`, the next token that chose the same prototype; n where none did, -1 where a token is not active.
        first: `[B, K]`, the first token that chose a prototype; n where none did.
        keys: `[B, n, D]`, the key centre of its prototype right after the token at a place.
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
        self._bank, self._config, self._tokens = bank, config, tokens
        self.chosen, self.active = chosen, active
        (B, n), K, T = chosen.shape, bank.mass.shape[2], tokens.keys.shape[1]
        device = chosen.device
        self.token = torch.arange(n, device=device)
        head = torch.arange(B, device=device)[:, None]
        ordered = sorted_from(torch.where(active, chosen, K) * n + self.token)
        self.order = ordered.remainder(n)
        group = ordered.div(n, rounding_mode="floor")
        self._acts = group < K
        # Who stands beside another of its prototype; those that are not active stand alone.
        joined = torch.nn.functional.pad((group[:, 1:] == group[:, :-1]) & self._acts[:, 1:], (1, 1))
        self._is_last = ~joined[:, 1:]
        following = torch.nn.functional.pad(self.order[:, 1:], (0, 1))
        self.next = torch.where(self._is_last, n, following).masked_fill_(~self._acts, -1)
        self.prototype = chosen.gather(1, self.order)
        self.first = first_to_choose(chosen, active, K)
        # How many updates a prototype has had, none by those that are not active; and whose update it has seen.
        begin = self.token.masked_fill(joined[:, :-1], 0).cummax(1).values
        self._count = (self.token + 1 - begin).masked_fill_(~self._acts, 0)
        mine = group.int()
        self._same = mine[:, :, None] == torch.where(self._acts, mine, -1)[:, None]
        self._rows = (head * K + self.prototype).view(-1)
        self._given = (head * T + part.start + self.order).view(-1)
        self._seen = tokens.seen.at(part)
        self._weights: dict[float, Tensor] = {}
        self.keys = self._moved(bank.key_center, self._of(tokens.keys), config.key_rate)
        coordinates = self._seen.coordinates[self.order]
        self.means = self._moved(bank.mean, coordinates, config.spatial_rate)
        offset = coordinates - self.means
        outer = (offset[..., :, None] * offset[..., None, :]).flatten(2)
        self.covariances = self._moved(bank.covariance.flatten(3), outer, config.spatial_rate)

    def _of(self, given: Tensor) -> Tensor:
        """A part of the tokens `[B, T, F]`, that of each place, `[B, n, F]`."""
        return given.reshape(-1, given.shape[2]).index_select(0, self._given).view(*self.order.shape, -1)

    def _held(self, name: str) -> Tensor:
        """A part of the prototypes `[L, H, K, ...]`, that of each place, `[B * n, ...]`."""
        held: Tensor = getattr(self._bank, name)
        return held.flatten(0, 2).index_select(0, self._rows)

    def _moved(self, held: Tensor, given: Tensor, rate: float) -> Tensor:
        """A part of the prototypes `[L, H, K, F]` after each token, moved towards what these give, `[B, n, F]`."""
        kept, shares = _shares(len(self.token), rate, held.device)
        if rate not in self._weights:
            self._weights[rate] = torch.where(self._same, shares, 0.0)
        before = held.flatten(0, 2).index_select(0, self._rows).view_as(given)
        return torch.baddbmm(before * kept[self._count][..., None], self._weights[rate], given)

    def write_(self, step: int, residuals: tuple[Tensor, Tensor]) -> None:
        """Move the prototypes in the bank; write keys and values less their centres right after them into the places of
        these tokens in `residuals`, `[B, T, D]` each."""
        bank, tokens = self._bank, self._tokens
        given = self._of(tokens.values)
        values = self._moved(bank.value_center, given, self._config.value_rate)
        for residual, less in zip(residuals, (self._of(tokens.keys) - self.keys, given - values), strict=True):
            write_rows_(residual.flatten(0, 1), self._given, less.flatten(0, 1))
        # Everyone writes what the last one makes of its prototype. Those that are not active do as the first place
        # does; if that one is not either, the prototype stays as it is.
        n = len(self.token)
        last = self.token.masked_fill(~self._is_last, n).flip(1).cummin(1).values.flip(1)
        last = torch.where(self._acts, last, last[:, :1])
        place = (last + torch.arange(0, last.numel(), n, device=last.device)[:, None]).view(-1)
        rows, acts = self._rows.index_select(0, place), self._acts.view(-1)
        bank.mass.view(-1).index_add_(0, self._rows, acts.long())
        given_all = {
            "key_center": self.keys,
            "value_center": values,
            "mean": self.means,
            "covariance": self.covariances,
            "last_step": torch.where(acts, step, self._held("last_step")),
            "position": self._positions(),
        }
        for name, new in given_all.items():
            held = getattr(bank, name).view(len(bank.mass.view(-1)), -1)
            write_rows_(held, rows, new.view(-1, held.shape[1]).index_select(0, place))
        bank.touch_(rows)

    def _positions(self) -> Tensor:
        """The anchor of its prototype, `[B * n, P]`, as it is after the last token; masses are up to date."""
        held = self._held("position")
        if self._config.anchor == "first":
            return held
        seen, acts = self._seen.positions[self.order].view_as(held), self._acts.view(-1, 1)
        if self._config.anchor == "recent":
            return torch.where(acts, seen, held)
        # Sums of offsets, not of positions: these stay exact in float32 however long the stream is.
        offsets = ((seen - held) * acts).view(*self.order.shape, -1)
        total = torch.bmm(self._same.to(held.dtype), offsets).view_as(held)
        return held + total / self._held("mass")[:, None].clamp(min=1)


def first_to_choose(chosen: Tensor, active: Tensor, prototypes: int) -> Tensor:
    """The first of the `active` `[B, n]` tokens that has `chosen` `[B, n]` a prototype, `[B, K]`; n where none has."""
    n = chosen.shape[1]
    token = torch.where(active, torch.arange(n, device=chosen.device), n)
    return token.new_full((len(chosen), prototypes), n).scatter_reduce_(1, chosen, token, "amin")


@lru_cache(maxsize=32)
def _shares(tokens: int, rate: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """What is left of a prototype after 0, 1, ... of the tokens, `[n + 1]`; and the share of an earlier one in what it
    is after a later one, `[n, n]`, where all come one after the other."""
    kept = (1 - rate) ** torch.arange(tokens + 1, device=device, dtype=torch.float64)
    token = torch.arange(tokens, device=device)
    later = token[:, None] - token
    return kept.float(), (rate * kept[later.clamp(min=0)]).float().tril()
