"""Continuity-aware assignment of tokens to prototypes (Algorithm 1).

All layers and heads go through it together, one token after the other. The costs of a step are one
matrix; after each token only the column of the prototype that it moved is computed again, which is
exact.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from protokv.core.bank import FarTokens
from protokv.device.arrays import add_rows_, find_first_minimum
from protokv.memories.paper.bank import PaperBank
from protokv.memories.paper.settings import PaperConfig

# Added to the diagonal of Sigma, which shrinks towards 0 while all tokens come from one place.
_SIGMA_FLOOR = 1e-4
# Costs `B * T * K` that are held at once. Longer steps are split; results do not depend on it.
_BLOCK_ELEMENTS = 2**24


def assign_tokens_(
    bank: PaperBank, tokens: FarTokens, step: int, config: PaperConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Put each token into the prototype of least cost (equation 1), in order; free slots come
    before all others.

    Returned are the rows of the bank `[T * B]` that changed, and what `ResidualStats.record_`
    takes.
    """
    L, H, K = bank.mass.shape
    B, T, D = tokens.keys.shape
    device = bank.mass.device
    head = torch.arange(B, device=device)
    directions = normalize(tokens.keys, dim=-1)
    coordinates = tokens.coordinates
    # c, p and mu move the same way, each at its rate: they stand side by side, with Sigma after, [B
    # * K, 2 D + 6].
    points = torch.cat((tokens.keys, tokens.values, coordinates.expand(B, T, 2)), 2)
    held = torch.cat(
        (bank.key_center, bank.value_center, bank.mean, bank.covariance.flatten(3)), 3
    ).flatten(0, 2)
    rates = torch.tensor(
        [config.key_rate] * D + [config.value_rate] * D + [config.spatial_rate] * 3, device=device
    )
    # A free slot becomes the token itself, with Sigma = I.
    opening = torch.tensor([1.0] * (2 * D + 2) + [0.0], device=device)
    identity = torch.eye(2, device=device)
    held[:, -4:] += identity.flatten() * (bank.mass.view(-1, 1) == 0)
    exact_coordinates = coordinates.double()
    floor = _SIGMA_FLOOR * identity.double()
    chosen = []
    opened = []
    after = []
    block = max(1, _BLOCK_ELEMENTS // (B * K))
    for start in range(0, T, block):
        stop = min(start + block, T)
        idle = step - bank.last_step > config.idle_steps
        more = (float(config.idle_weight) * idle).masked_fill_(bank.mass == 0, -torch.inf)
        own = directions[:, start:stop]
        cost = _costs(held.view(B, K, -1), own, coordinates[start:stop], config)
        cost += more.view(B, 1, K)
        for t in range(start, stop):
            least, slot = find_first_minimum(cost[:, t - start])
            rows = head * K + slot
            is_free = least == -torch.inf
            rate = torch.where(is_free[:, None], opening, rates)
            new = held[rows]
            new[:, :-4].lerp_(points[:, t], rate[:, :-1])
            offset = coordinates[t] - new[:, -6:-4]
            new[:, -4:].lerp_((offset[:, :, None] * offset[:, None]).flatten(1), rate[:, -1:])
            held[rows] = new
            chosen.append(rows)
            opened.append(is_free)
            after.append(new)
            # Only these prototypes changed, and they are neither free nor idle now.
            column = (
                -normalize(new[:, None, :D], dim=-1) @ directions[:, t + 1 : stop].mT
            ).squeeze(1)
            if config.spatial_weight:
                mean, spread = new[:, -6:].double().split_with_sizes((2, 4), 1)
                root = torch.linalg.cholesky_ex(spread.view(B, 2, 2) + floor).L
                offset = exact_coordinates[t + 1 : stop].T - mean[:, :, None]
                whitened = torch.linalg.solve_triangular(root, offset, upper=False)
                column += config.spatial_weight * whitened.square_().sum(1)
            cost[head, t + 1 - start :, slot] = column
        rows = torch.stack(chosen[start:], 1)
        is_new = torch.stack(opened[start:], 1)
        _count_tokens_(bank, rows, is_new, tokens.positions[start:stop].double(), step, config)
    rows = torch.stack(chosen, 1)
    is_new = torch.stack(opened, 1)
    residuals = (points - torch.stack(after, 1)[..., :-4])[..., : 2 * D].reshape(B, T, 2, D)
    changed = rows.view(-1)
    keys, values, means, spreads = held[changed].split_with_sizes((D, D, 2, 4), 1)
    bank.put_centers_(changed, keys, values)
    bank.mean.flatten(0, 2)[changed] = means
    bank.covariance.flatten(0, 2).flatten(1)[changed] = spreads
    bank.opened += is_new.sum(1).view(L, H)
    bank.absorbed += (~is_new).sum(1).view(L, H)
    bank.touch_(changed)
    return changed, residuals.movedim(2, 0).contiguous(), (rows % K).masked_fill_(is_new, -1)


def _count_tokens_(
    bank: PaperBank,
    rows: Tensor,
    is_new: Tensor,
    positions: Tensor,
    step: int,
    config: PaperConfig,
) -> None:
    """Count tokens `[B, T]` at `positions` `[T, P]` in prototypes `rows`, and move the anchors of
    these.
    """
    B, T = rows.shape
    flat = rows.view(-1)
    anchors = bank.position.flatten(0, 2)
    mass = bank.mass.view(-1)
    mass.index_add_(0, flat, torch.ones_like(flat))
    bank.last_step.view(-1)[flat] = step
    if config.anchor == "average":
        add_rows_(anchors, flat, (positions.repeat(B, 1) - anchors[flat]) / mass[flat, None])
        return
    # The last token of each prototype, or the token that opened it.
    counts = torch.ones_like(is_new) if config.anchor == "recent" else is_new
    token = torch.arange(T, device=rows.device).expand(B, T)[counts]
    newest = torch.full_like(mass, -1).scatter_reduce_(0, rows[counts], token, "amax")
    moved = newest >= 0
    anchors[moved] = positions[newest[moved]]


def _costs(held: Tensor, directions: Tensor, coordinates: Tensor, config: PaperConfig) -> Tensor:
    """Return equation 1 but for idleness, of T tokens and n prototypes, `[B, T, n]` float32.

    `held` is `[B, n, 2 D + 6]`, `directions` are normalized keys `[B, T, D]`, which stand at
    `coordinates` `[T, 2]`. The squared Mahalanobis distance is a quadratic form in x^2, xy, y^2, x,
    y and 1: a narrow product, in float64 because this form cancels where Sigma is close to
    `_SIGMA_FLOOR`.
    """
    keys = held[:, :, : directions.shape[2]]
    cost = directions @ normalize(keys, dim=-1).mT.neg()
    if config.spatial_weight:
        x, y = coordinates.double().unbind(1)
        features = torch.stack((x * x, x * y, y * y, x, y, torch.ones_like(x)), 1)
        x, y, xx, xy, _, yy = held[..., -6:].double().unbind(2)
        xx = xx + _SIGMA_FLOOR
        yy = yy + _SIGMA_FLOOR
        weight = config.spatial_weight / (xx * yy - xy * xy)
        a = weight * yy
        b = -weight * xy
        c = weight * xx
        d = a * x + b * y
        e = b * x + c * y
        form = torch.stack((a, 2 * b, c, -2 * d, -2 * e, d * x + e * y), 1)
        cost += features @ form
    return cost
