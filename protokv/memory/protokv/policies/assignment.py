"""Continuity-aware assignment and update of prototypes (Algorithm 1), for all layers and heads at once.

While a head has free slots, tokens open them. After that each token goes to the prototype of least cost
(equation 1) and moves it, one token after the other, as Algorithm 1 has it. Here all tokens of a block choose at once,
again and again: given what the tokens choose, what each of them moves its prototype to is a weighted sum (`updates`),
so every token can choose anew among the prototypes as it would have found them. What a token chooses depends on those
before it alone, so each round settles at least one token more, and when a round changes nothing the choices are those
of the loop. Most tokens settle at once. Knows nothing of residual histograms; it reports what was assigned where.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from protokv.config import PaperConfig
from protokv.memory.protokv.bank import PrototypeBank, first_of
from protokv.memory.protokv.policies.updates import Updates
from protokv.memory.protokv.policy import Assigned, FarTokens, asks_freely

# Added to the diagonal of Sigma, which shrinks towards 0 where tokens keep coming from one place.
SIGMA_FLOOR = 1e-4
# Costs of one block, B * T * K; longer runs of tokens are cut into blocks, which changes nothing but memory.
_BLOCK_ELEMENTS = 2**25
_CACHED_ELEMENTS = 2**16
# Prototypes that a token chooses among besides those that tokens before it have moved; all, where these do not do.
_CANDIDATES = 8
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
    assigned = torch.full((B, T), -1, device=tokens.keys.device)
    key_residual, value_residual = torch.zeros_like(tokens.keys), torch.zeros_like(tokens.values)
    taken = _open_free(bank, tokens, step, free) if free else assigned.new_zeros(B)
    block = max(1, _BLOCK_ELEMENTS // (B * K))
    for start in range(0, T, block):
        part = slice(start, min(start + block, T))
        active = torch.arange(part.start, part.stop, device=taken.device) >= taken[:, None]
        _assign(bank, tokens, part, active, step, config, (assigned, key_residual, value_residual))
    bank.absorbed += (assigned >= 0).sum(1).view(L, H)
    return Assigned(assigned, key_residual, value_residual)


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


def _assign(
    bank: PrototypeBank,
    tokens: FarTokens,
    part: slice,
    active: Tensor,
    step: int,
    config: PaperConfig,
    out: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Assign the tokens of `part`; `active` `[B, n]` says which heads take which."""
    K = bank.mass.shape[2]
    coordinates = tokens.seen.coordinates[part]
    directions = torch.nn.functional.normalize(tokens.keys[:, part], dim=-1, eps=1e-12)
    cost = _costs(bank, directions, coordinates, step, config)
    few = min(_CANDIDATES, K)
    candidates: Any = cost.topk(few, dim=2, largest=False)
    ask_each = asks_freely(cost)
    chosen, rounds, done = candidates.indices[:, :, 0], 1 if ask_each else _ROUNDS, 0
    while True:
        for _ in range(rounds):
            updates = Updates(bank, tokens, part, chosen, active, config)
            last, (chosen, short) = chosen, _choose(updates, candidates, directions, config)
        done += rounds
        changed, lost = _host((chosen != last).any(), short.any())
        if lost and few < K:
            few, done = K, 0
            candidates = cost.sort(dim=2)
        elif not changed:
            break
        else:
            # Where rounds go on, it is asked again after twice as many as there were.
            rounds = 1 if ask_each else 2 * done
    prototype, key_residual, value_residual = (tensor[:, part] for tensor in out)
    prototype.copy_(chosen.masked_fill(~active, -1))
    for residual, version in zip((key_residual, value_residual), updates.write_(step), strict=True):
        residual.copy_(version)


def _choose(updates: Updates, candidates: Any, directions: Tensor, config: PaperConfig) -> tuple[Tensor, Tensor]:
    """What each token chooses, `[B, n]`, among its candidates that no token before it has moved and the prototypes that
    some have, as these are by then; and which tokens would need more candidates."""
    cost, prototype = candidates.values, candidates.indices
    token = updates.token
    moved = updates.first.gather(1, prototype.flatten(1)).view_as(prototype) < token[:, None]
    still, which = cost.masked_fill(moved, torch.inf).min(2)
    unit = torch.nn.functional.normalize(updates.keys, dim=-1, eps=1e-12)
    if config.spatial_weight:
        form = _form(updates.means, updates.covariances, config)
        spatial = torch.bmm(_features(updates.coordinates).expand(len(form), -1, -1), form).float()
        costs = spatial.baddbmm_(directions, unit.transpose(1, 2), alpha=-1)
    else:
        costs = torch.bmm(directions, unit.transpose(1, 2)).neg_()
    # A token meets what the last one before it has made of a prototype.
    seen = (token < token[:, None]) & (updates.next[:, None] >= token[:, None])
    turned, by = costs.masked_fill_(~seen, torch.inf).min(2)
    short = updates.active & (turned > cost[:, :, -1]) & (still == torch.inf)
    stays = prototype.gather(2, which[..., None]).squeeze(2)
    chosen = torch.where(turned < still, updates.chosen.gather(1, by), stays)
    return torch.where(updates.active, chosen, updates.chosen), short


def _costs(bank: PrototypeBank, directions: Tensor, coordinates: Tensor, step: int, config: PaperConfig) -> Tensor:
    """Equation 1 for all tokens and prototypes, `[B, n, K]`; a free slot costs infinity.

    -cos is one float32 product. The Mahalanobis distance is a quadratic form in (x^2, xy, y^2, x, y, 1),
    hence one narrow product; in float64, because Sigma shrinks to `SIGMA_FLOOR` and the expanded form then
    cancels. The idle term and the free slots ride on its constant.
    """
    B, n, _ = directions.shape
    K = bank.mass.shape[2]
    idle = config.idle_weight * (step - bank.last_step > config.idle_steps)
    constant = idle.double().masked_fill(bank.mass == 0, torch.inf).view(B, 1, K)
    centers = torch.nn.functional.normalize(bank.key_center.view(B, K, -1), dim=-1, eps=1e-12)
    cost = directions.new_empty(B, n, K)
    if config.spatial_weight == 0:
        cost.copy_(constant.expand_as(cost))
    else:
        form = _form(bank.mean.view(B, K, 2), bank.covariance.view(B, K, 4), config)
        form[:, 5:] += constant
        features = _features(coordinates).expand(B, -1, -1)
        # On a CPU a few at a time: float64 costs are rounded to float32 while they are in its cache.
        few, some = (max(1, _CACHED_ELEMENTS // (n * K)), max(1, _CACHED_ELEMENTS // K)) if cost.is_cpu else (B, n)
        for start in range(0, B, few):
            heads = slice(start, start + few)
            for first in range(0, n, some):
                part = slice(first, first + some)
                cost[heads, part] = torch.bmm(features[heads, part], form[heads])
    return cost.baddbmm_(directions, centers.transpose(1, 2), alpha=-1)


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
