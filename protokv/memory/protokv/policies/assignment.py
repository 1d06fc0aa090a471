"""Continuity-aware assignment and update of prototypes (Algorithm 1), for all layers and heads at once.

While a head has free slots, tokens open them. After that each token goes to the prototype of least cost
(equation 1) and moves it, one token after the other, as Algorithm 1 has it. Here all tokens of a block choose at once,
again and again: given what the tokens choose, what each of them moves its prototype to is a weighted sum (`updates`),
so every token can choose anew among the prototypes as it would have found them. What a token chooses depends on those
before it alone, so each round settles at least one token more, and when a round changes nothing the choices are those
of the loop. Most tokens settle at once. Knows nothing of residual histograms; it reports what was assigned where.
"""

from __future__ import annotations

import torch
from torch import Tensor

from protokv.config import PaperConfig
from protokv.memory.protokv import loops
from protokv.memory.protokv.bank import PrototypeBank, first_of
from protokv.memory.protokv.policies.candidates import Candidates
from protokv.memory.protokv.policies.updates import Updates, first_to_choose
from protokv.memory.protokv.policy import Assigned, FarTokens, asks_freely
from protokv.memory.sorting import least_from
from protokv.parts import cut

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
    if loops.serve(bank.mass):
        from protokv.memory.protokv.loops.assigning import assign_in_turn_

        return assign_in_turn_(bank, tokens, taken, step, config)
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
    for heads in cut(B, _CACHED_ELEMENTS // (n * K), cost.device):
        if config.spatial_weight == 0:
            cost[heads] = constant[heads]
        else:
            for part in cut(n, _CACHED_ELEMENTS // K, cost.device):
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
