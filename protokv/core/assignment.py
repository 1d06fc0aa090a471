"""Continuity-aware assignment and update of prototypes (Algorithm 1), for all layers and heads at once.

While a head has free slots, tokens open them. After that each token goes to the prototype of least cost
(equation 1) and moves it, one token after the other, as Algorithm 1 has it. Here all tokens of a block choose at once,
again and again: given what the tokens choose, what each of them moves its prototype to is a weighted sum (`updates`),
so every token can choose anew among the prototypes as it would have found them. What a token chooses depends on those
before it alone, so each round settles at least one token more, and when a round changes nothing the choices are those
of the loop. Most tokens settle at once. Knows nothing of residual histograms; it reports what was assigned where.

`Updates`: what tokens make of the prototypes that they choose, one after the other, without going through them.

Each token moves its prototype a share r of the way towards itself, so after the tokens j_1 < ... < j_m a centre is
(1 - r)^m c + sum_i r (1 - r)^(m - i) x_{j_i}: for all tokens of a block one product of a triangular matrix of weights
with the tokens. Sigma is such a sum of outer products. Tokens stand in order of their prototypes here, so that those of
one stand side by side and a weight depends on their distance alone. Owns this and what is written to the bank; knows
nothing of how prototypes are chosen (`assignment`).

`Candidates`: the prototypes that each token would choose first, as long as no other token moves them.

Most tokens take the cheapest of all. Who finds that one moved needs the next cheapest, some need many: where the host
may ask freely these tokens alone are given more; elsewhere all have some from the beginning and are given more at once.
Knows nothing of what moves prototypes (`updates`).
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from protokv.config import PaperConfig
from protokv.core.arrays import chunks, least_from, sorted_from, write_rows_
from protokv.core.bank import Assigned, FarTokens, PrototypeBank, asks_freely, first_of

# Added to the diagonal of Sigma, which shrinks towards 0 where tokens keep coming from one place.
SIGMA_FLOOR = 1e-4
# Costs of one block, B * T * K; longer runs of tokens are cut into blocks, which changes nothing but memory.
_BLOCK_ELEMENTS = 2**25
_CACHED_ELEMENTS = 2**16
# Rounds before it is asked whether the tokens have settled, where that is a wait: most have after one or two.
_ROUNDS = 2


def assign_(
    bank: PrototypeBank, tokens: FarTokens, step: int, config: PaperConfig, *, free: int | None = None
) -> Assigned:
    """Put evicted tokens into the bank, in order, at time `step`. `free`: slots of one head at most that they can open;
    None: ask."""
    L, H, K, _ = bank.key_center.shape
    B, T, _ = tokens.keys.shape
    if free is None:
        free = min(T, int((bank.mass == 0).sum(2).max()))
    taken = _open_free(bank, tokens, step, free) if free else torch.zeros_like(bank.mass[:, :, 0]).view(B)
    assigned = torch.full((B, T), -1, device=tokens.keys.device)
    residuals = torch.empty_like(tokens.keys), torch.empty_like(tokens.values)
    block = max(1, _BLOCK_ELEMENTS // (B * K))
    for start in range(0, T, block):
        part = slice(start, min(start + block, T))
        active = torch.arange(part.start, part.stop, device=taken.device) >= taken[:, None]
        chosen, updates = _chosen(bank, tokens, part, active, step, config)
        assigned[:, part] = chosen.masked_fill(~active, -1)
        updates.write_(step, residuals)
    bank.absorbed += (assigned >= 0).sum(1).view(L, H)
    return Assigned(assigned, *residuals)


def _host(*flags: Tensor) -> list[bool]:
    """What they are; asks the device once."""
    return [bool(flag) for flag in torch.stack(flags).tolist()]


def _open_free(bank: PrototypeBank, tokens: FarTokens, step: int, most: int) -> Tensor:
    """Open free slots, lowest first, with the first tokens, `most` of a head; return how many each took, `[B]`."""
    L, H, K, _ = bank.key_center.shape
    free = (bank.mass == 0).view(L * H, K)
    taken = free.sum(1).clamp(max=most)
    rows = torch.arange(0, L * H * K, K, device=free.device)[:, None] + first_of(free, most)
    opened = torch.arange(most, device=free.device) < taken[:, None]
    seen = tokens.seen.at(slice(most))
    bank.open_(rows, tokens.keys[:, :most], tokens.values[:, :most], seen, step, opened)
    bank.opened += taken.view(L, H)
    return taken


def _chosen(
    bank: PrototypeBank, tokens: FarTokens, part: slice, active: Tensor, step: int, config: PaperConfig
) -> tuple[Tensor, Updates]:
    """What the tokens of `part` choose, `[B, n]`, and what these choices make of the prototypes; `active` `[B, n]` says
    which heads take which."""
    K = bank.mass.shape[2]
    features = _features(tokens.seen.coordinates[part])
    directions = unit_of(tokens.keys[:, part])
    cost = _costs(bank, directions, features, step, config)
    candidates = Candidates(cost)
    ask_each = asks_freely(cost)
    chosen, rounds, done = candidates.prototype[:, :, 0], 1 if ask_each else _ROUNDS, 0
    if ask_each:
        candidates.deepen_(first_to_choose(chosen, active, K).gather(1, chosen) < torch.arange(chosen.shape[1]))
    while True:
        for _ in range(rounds):
            updates = Updates(bank, tokens, part, chosen, active, config)
            last, (chosen, short) = chosen, _choose(updates, candidates, directions, features, config)
        done += rounds
        changed, lost = _host((chosen != last).any(), short.any())
        if lost:
            candidates.deepen_(short)
            done = 0
        elif not changed:
            return chosen, updates
        else:
            # Where rounds go on, it is asked again after twice as many as there were.
            rounds = 1 if ask_each else 2 * done


def _choose(
    updates: Updates, candidates: Candidates, directions: Tensor, features: Tensor, config: PaperConfig
) -> tuple[Tensor, Tensor]:
    """What each token chooses, `[B, n]`, among its candidates that no token before it has moved and the prototypes that
    some have, as these are by then; and which tokens would need more candidates."""
    token, prototype = updates.token, candidates.prototype
    moved = updates.first.gather(1, prototype.flatten(1)).view_as(prototype) < token[:, None]
    still, which = least_from(candidates.cost.masked_fill(moved, torch.inf))
    unit = unit_of(updates.keys)
    if config.spatial_weight:
        form = _form(updates.means, updates.covariances, config)
        spatial = torch.bmm(features.expand(len(form), -1, -1), form).float()
        costs = spatial.baddbmm_(directions, unit.transpose(1, 2), alpha=-1)
    else:
        costs = torch.bmm(directions, unit.transpose(1, 2)).neg_()
    # A token meets what the last one before it has made of a prototype.
    mine, last, following = (part.int() for part in (token[:, None], updates.order[:, None], updates.next[:, None]))
    turned, by = least_from(torch.where((last >= mine) | (following < mine), torch.inf, costs))
    short = updates.active & (turned > candidates.bound) & (still == torch.inf)
    stays = prototype.gather(2, which[..., None]).squeeze(2)
    chosen = torch.where(turned < still, updates.prototype.gather(1, by), stays)
    return torch.where(updates.active, chosen, updates.chosen), short


def _costs(bank: PrototypeBank, directions: Tensor, features: Tensor, step: int, config: PaperConfig) -> Tensor:
    """Equation 1 for all tokens and prototypes, `[B, n, K]`; a free slot costs infinity.

    -cos is one float32 product. The Mahalanobis distance is a quadratic form in (x^2, xy, y^2, x, y, 1),
    hence one narrow product; in float64, because Sigma shrinks to `SIGMA_FLOOR` and the expanded form then
    cancels. The idle term and the free slots ride on its constant.
    """
    B, n, D = directions.shape
    K = bank.mass.shape[2]
    idle = config.idle_weight * (step - bank.last_step > config.idle_steps)
    constant = idle.double().masked_fill(bank.mass == 0, torch.inf).view(B, 1, K)
    centers = bank.key_center.view(B, K, D)
    cost = directions.new_empty(B, n, K)
    if config.spatial_weight:
        form = _form(bank.mean.view(B, K, 2), bank.covariance.view(B, K, 4), config)
        form[:, 5:] += constant
    for heads in chunks(B, _CACHED_ELEMENTS // (n * K), cost.device):
        if config.spatial_weight == 0:
            cost[heads] = constant[heads]
        else:
            for part in chunks(n, _CACHED_ELEMENTS // K, cost.device):
                cost[heads, part] = torch.bmm(features[part].expand(len(form[heads]), -1, -1), form[heads])
        unit = unit_of(centers[heads])
        cost[heads].baddbmm_(directions[heads], unit.transpose(1, 2), alpha=-1)
    return cost


def unit_of(vectors: Tensor) -> Tensor:
    """Vectors `[..., D]` of length 1; of length 0 where they are 0."""
    length: Tensor = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return vectors / length.clamp_min_(1e-12)


def _form(mean: Tensor, covariance: Tensor, config: PaperConfig) -> Tensor:
    """The weighted Mahalanobis distance from prototypes with moments `[B, m, 2]` and `[B, m, 4]`, as a quadratic form:
    its coefficients for `_features`, `[B, 6, m]` float64."""
    mu_x, mu_y = mean.double().unbind(-1)
    xx, xy, _, yy = covariance.double().unbind(-1)
    xx, yy = xx + SIGMA_FLOOR, yy + SIGMA_FLOOR
    weight = config.spatial_weight / (xx * yy - xy * xy)
    a, b, c = weight * yy, -weight * xy, weight * xx
    d, e = a * mu_x + b * mu_y, b * mu_x + c * mu_y
    return torch.stack((a, 2 * b, c, -2 * d, -2 * e, d * mu_x + e * mu_y), 1)


def _features(coordinates: Tensor) -> Tensor:
    """x^2, xy, y^2, x, y, 1 of coordinates `[n, 2]`: `[n, 6]` float64."""
    x, y = coordinates.double().unbind(-1)
    return torch.stack((x * x, x * y, y * y, x, y, torch.ones_like(x)), 1)


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


# Of a token that needs more than one; all, where these do not do.
_CANDIDATES = 8


class Candidates:
    """Candidates of tokens with costs `[B, n, K]`, cheapest first.

    Attributes:
        cost, prototype: `[B, n, c]`, the known ones; infinity and any prototype behind the last one of a token.
        bound: `[B, n]`, what all others cost at least; infinity where all are known.
    """

    def __init__(self, costs: Tensor) -> None:
        self._costs, self._shape = costs.flatten(0, 1), costs.shape
        if asks_freely(costs):
            least, place = least_from(self._costs)
            self._take(least[:, None], place[:, None])
            self._depth = torch.ones_like(place)
        else:
            self._take(*self._least(slice(None), min(_CANDIDATES, costs.shape[2])))
        self.bound = self.cost[:, :, -1].clone()

    def _least(self, rows: slice | Tensor, few: int) -> tuple[Tensor, Tensor]:
        found = self._costs[rows].topk(few, dim=1, largest=False)
        return found.values, found.indices

    def _take(self, cost: Tensor, prototype: Tensor) -> None:
        B, n, _ = self._shape
        self.cost, self.prototype = cost.view(B, n, -1), prototype.view(B, n, -1)

    def deepen_(self, tokens: Tensor) -> None:
        """Find more for `tokens` `[B, n]` bool, or for all."""
        K = self._shape[2]
        if not asks_freely(tokens):
            self._take(*self._least(slice(None), K))
            self.bound = torch.full_like(self.bound, torch.inf)
            return
        rows = tokens.view(-1).nonzero().squeeze(1)
        if not len(rows):
            return
        few = min(_CANDIDATES, K) if (self._depth[rows] < _CANDIDATES).all() else K
        more = max(0, few - self.cost.shape[2])
        cost = torch.nn.functional.pad(self.cost, (0, more), value=torch.inf).flatten(0, 1)
        prototype = torch.nn.functional.pad(self.prototype, (0, more)).flatten(0, 1)
        cost[rows, :few], prototype[rows, :few] = self._least(rows, few)
        self._take(cost, prototype)
        self._depth[rows] = few
        self.bound.view(-1)[rows] = torch.inf if few == K else cost[rows, few - 1]
