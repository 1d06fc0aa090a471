"""Continuity-aware assignment and update of prototypes (Algorithm 1), for all layers and heads at once.

While a head has free slots, tokens open them. After that each token goes to the prototype of least cost
(equation 1) and moves it, one token after the other, as Algorithm 1 has it. The costs of a block of tokens
are one batched product; after each token only the column of the prototype that it moved is computed again.
That is exact, not a mini-batch: no other column can have changed. Knows nothing of residual histograms; it
reports what was assigned where.
"""

from __future__ import annotations

import torch
from torch import Tensor

from protokv.config import PaperConfig
from protokv.memory.protokv.bank import PrototypeBank
from protokv.memory.protokv.policy import Assigned, FarTokens

# Added to the diagonal of Sigma, which shrinks towards 0 where tokens keep coming from one place.
SIGMA_FLOOR = 1e-4
# Costs of one block, B * T * K; longer runs of tokens are cut into blocks, which changes nothing but memory.
_BLOCK_ELEMENTS = 2**25
_CACHED_ELEMENTS = 2**18


def assign_(bank: PrototypeBank, tokens: FarTokens, step: int, config: PaperConfig) -> Assigned:
    """Put evicted tokens into the bank, in order, at time `step`."""
    L, H, K, _ = bank.key_center.shape
    B, T, _ = tokens.keys.shape
    block = max(1, _BLOCK_ELEMENTS // (B * K))
    assigned = torch.full((B, T), -1, device=tokens.keys.device)
    key_residual, value_residual = torch.zeros_like(tokens.keys), torch.zeros_like(tokens.values)
    taken = _open_free(bank, tokens, step)
    first = int(taken.min())
    for start in range(first, T, block):
        part = slice(start, min(start + block, T))
        active = torch.arange(part.start, part.stop, device=taken.device) >= taken[:, None]
        _assign(bank, tokens, part, active, step, config, (assigned, key_residual, value_residual))
    bank.absorbed += (assigned >= 0).sum(1).view(L, H)
    return Assigned(assigned, key_residual, value_residual)


def _open_free(bank: PrototypeBank, tokens: FarTokens, step: int) -> Tensor:
    """Open free slots, lowest first, with the first tokens; return how many each head took, `[B]`."""
    L, H, K, _ = bank.key_center.shape
    T = tokens.keys.shape[1]
    free = (bank.mass == 0).view(L * H, K)
    taken = free.sum(1).clamp(max=T)
    most = int(taken.max())
    if most:
        order = free.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :most]
        head, token = (torch.arange(most, device=taken.device) < taken[:, None]).nonzero(as_tuple=True)
        rows = head * K + order[head, token]
        bank.open_(rows, tokens.keys[head, token], tokens.values[head, token], tokens.seen.at(token), step)
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
    """Assign the tokens of `part`, one after the other; `active` `[B, n]` says which heads take which."""
    K, D = bank.key_center.shape[2:]
    keys, values = tokens.keys[:, part], tokens.values[:, part]
    coordinates = tokens.seen.coordinates[part]
    B, n, _ = keys.shape
    directions = torch.nn.functional.normalize(keys, dim=-1, eps=1e-12)
    cost = _costs(bank, directions, coordinates, step, config)

    key_center, value_center = bank.key_center.view(B * K, D), bank.value_center.view(B * K, D)
    mean, covariance = bank.mean.view(B * K, 2), bank.covariance.view(B * K, 4)
    # Written as products of their own, not as lerp or add(alpha=): these may fuse, and round differently in
    # the last elements of a row than in the others.
    new_keys, new_values = keys * config.key_rate, values * config.value_rate
    new_means = coordinates * config.spatial_rate
    base = torch.arange(B, device=keys.device) * K
    everywhere = active.all(0).tolist()
    prototype, key_residual, value_residual = (tensor[:, part] for tensor in out)

    for t in range(n):
        heads = None if everywhere[t] else active[:, t].nonzero().squeeze(1)
        best = _rows(cost[:, t], heads).argmin(1)
        rows = _rows(base, heads) + best
        center = key_center[rows] * (1 - config.key_rate) + _rows(new_keys[:, t], heads)
        value = value_center[rows] * (1 - config.value_rate) + _rows(new_values[:, t], heads)
        mu = mean[rows] * (1 - config.spatial_rate) + new_means[t]
        offset = coordinates[t] - mu
        outer = (offset[:, :, None] * offset[:, None, :]).flatten(1) * config.spatial_rate
        sigma = covariance[rows] * (1 - config.spatial_rate) + outer
        key_center[rows], value_center[rows], mean[rows], covariance[rows] = center, value, mu, sigma
        if heads is None:
            prototype[:, t] = best
            key_residual[:, t], value_residual[:, t] = keys[:, t] - center, values[:, t] - value
        else:
            prototype[heads, t] = best
            key_residual[heads, t], value_residual[heads, t] = (
                keys[heads, t] - center,
                values[heads, t] - value,
            )
        if t + 1 < n:
            later = slice(t + 1, n)
            column = _column(center, mu, sigma, _rows(directions[:, later], heads), coordinates[later], config)
            index = best[:, None, None].expand(-1, n - t - 1, 1)
            if heads is None:
                cost[:, later].scatter_(2, index, column[..., None])
            else:
                cost[heads, later] = cost[heads, later].scatter(2, index, column[..., None])

    _note(bank, tokens.seen.positions[part], prototype, step, config)


def _rows(tensor: Tensor, heads: Tensor | None) -> Tensor:
    return tensor if heads is None else tensor[heads]


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
        mu_x, mu_y = bank.mean.double().view(B, K, 2).unbind(-1)
        xx, xy, _, yy = bank.covariance.double().view(B, K, 4).unbind(-1)
        xx, yy = xx + SIGMA_FLOOR, yy + SIGMA_FLOOR
        weight = config.spatial_weight / (xx * yy - xy * xy)
        a, b, c = weight * yy, -weight * xy, weight * xx
        d, e = a * mu_x + b * mu_y, b * mu_x + c * mu_y
        form = torch.stack((a, 2 * b, c, -2 * d, -2 * e, d * mu_x + e * mu_y), 1)
        x, y = coordinates.double().unbind(-1)
        features = torch.stack((x * x, x * y, y * y, x, y, torch.ones_like(x)), 1).expand(B, -1, -1)
        # A few heads at a time: their float64 costs are rounded to float32 while a CPU has them in its cache.
        few = max(1, _CACHED_ELEMENTS // (n * K))
        for start in range(0, B, few):
            heads = slice(start, start + few)
            cost[heads] = torch.baddbmm(constant[heads], features[heads], form[heads])
    return cost.baddbmm_(directions, centers.transpose(1, 2), alpha=-1)


def _column(
    center: Tensor, mu: Tensor, sigma: Tensor, directions: Tensor, coordinates: Tensor, config: PaperConfig
) -> Tensor:
    """Equation 1 for the tokens that are left and one prototype a head, just touched: `[R, n]`."""
    unit = torch.nn.functional.normalize(center, dim=-1, eps=1e-12)
    column = -torch.bmm(directions, unit[:, :, None]).squeeze(2)
    if config.spatial_weight:
        offset = coordinates - mu[:, None]
        x, y = offset.unbind(-1)
        xx, xy, _, yy = sigma[:, None].unbind(-1)
        xx, yy = xx + SIGMA_FLOOR, yy + SIGMA_FLOOR
        quadratic = yy * x * x - 2 * xy * x * y + xx * y * y
        column += config.spatial_weight / (xx * yy - xy * xy) * quadratic
    return column


def _note(bank: PrototypeBank, positions: Tensor, prototype: Tensor, step: int, config: PaperConfig) -> None:
    """Mass, recency and anchor of what absorbed tokens; these do not depend on the order within a block."""
    K, P = bank.position.shape[2:]
    head, token = (prototype >= 0).nonzero(as_tuple=True)
    flat = head * K + prototype[head, token]
    mass, position = bank.mass.view(-1), bank.position.view(-1, P)
    added = torch.zeros_like(mass).index_add_(0, flat, torch.ones_like(flat))
    rows = added.nonzero().squeeze(1)
    if config.anchor == "recent":
        last = torch.full(mass.shape, -1, device=mass.device).scatter_reduce_(0, flat, token, "amax")
        position[rows] = positions[last[rows]]
    elif config.anchor == "average":
        # Sums of offsets, not of positions: these stay exact in float32 however long the stream is.
        offsets = torch.zeros_like(position).index_add_(0, flat, positions[token] - position[flat])
        position[rows] += offsets[rows] / (mass + added)[rows, None]
    mass += added
    bank.last_step.view(-1)[rows] = step
    bank.touch_(rows)
