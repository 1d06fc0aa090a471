"""Algorithm 1 as the paper has it: one token after the other chooses its prototype and moves it.

What each token would pay for each prototype as a step finds it is one product and one pass over it. Then the tokens
choose in order, and each asks anew what those prototypes cost that others before it have moved. Heads know nothing of
each other. Knows nothing of free slots, which are taken before, and of residual histograms.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protokv.config import PaperConfig
from protokv.core.arrays import chunks
from protokv.core.assignment import SIGMA_FLOOR, unit_of
from protokv.core.bank import Assigned, FarTokens, PrototypeBank
from protokv.core.loops.compiling import compiled, compiled_in_any_order

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Whole = NDArray[np.int64]

# Tokens whose costs are made at once: each of them looks at all prototypes that those before it have moved.
_TOKENS = 256
# Costs that are made at once, of as many heads: they stay in the cache until the tokens have chosen.
_CACHED_ELEMENTS = 2**19
# What of a prototype is read for a cost: mu, the factors of its Sigma (`_factor`), and 1 / |c|.
_FORM = 6


class _Held(NamedTuple):
    """The bank, a row for each head."""

    keys: Floats
    values: Floats
    mean: Floats
    covariance: Floats
    position: Doubles
    mass: Whole


class _Given(NamedTuple):
    """The tokens, their keys at length 1 too, and what becomes of them: their prototype and what they are less its
    centre."""

    directions: Floats
    keys: Floats
    values: Floats
    coordinates: Floats
    positions: Doubles
    chosen: Whole
    key_residual: Floats
    value_residual: Floats


class _Rule(NamedTuple):
    """Rates, lambda_sp, what is added to the diagonal of Sigma, and the anchor: 0 first, 1 recent, 2 average."""

    key_rate: np.float32
    value_rate: np.float32
    spatial_rate: np.float32
    weight: float
    floor: float
    anchor: int


def assign_in_turn_(bank: PrototypeBank, tokens: FarTokens, taken: Tensor, step: int, config: PaperConfig) -> Assigned:
    """Let the tokens behind the first `taken` `[B]` of each head, which have opened slots, choose prototypes and move
    them, at time `step`."""
    B, T, D = tokens.keys.shape
    K = bank.mass.shape[2]
    centers = bank.key_center.view(B, K, D)
    keys, values = tokens.keys.contiguous(), tokens.values.contiguous()
    directions = unit_of(keys)
    made = torch.full((B, T), -1), torch.empty_like(keys), torch.empty_like(values)
    seen = tokens.seen.coordinates.contiguous(), tokens.seen.positions.contiguous()
    given = _Given(*(part.numpy() for part in (directions, keys, values, *seen, *made)))
    parts = (centers, bank.value_center, bank.mean, bank.covariance, bank.position, bank.mass[..., None])
    held = _Held(*(part.view(B, K, -1).numpy() for part in parts))
    rule = _Rule(
        np.float32(config.key_rate),
        np.float32(config.value_rate),
        np.float32(config.spatial_rate),
        float(config.spatial_weight),
        SIGMA_FLOOR,
        ("first", "recent", "average").index(config.anchor),
    )
    idle = config.idle_weight * (step - bank.last_step > config.idle_steps)
    extra = idle.float().masked_fill_(bank.mass == 0, torch.inf).view(B, K).numpy()
    for part in chunks(T, _TOKENS, keys.device):
        for heads in chunks(B, _CACHED_ELEMENTS // (K * (part.stop - part.start)), keys.device):
            costs = torch.bmm(directions[heads, part], centers[heads].transpose(1, 2)).numpy()
            form = np.empty((len(costs), _FORM, K), np.float32)
            _price_(costs, form, extra, heads.start, part.start, given, held, rule)
            cheapest = costs.argmin(2)
            _choose_(costs, cheapest, form, extra, heads.start, part.start, taken.numpy(), given, held, rule)
    chosen = made[0]
    absorbed = chosen >= 0
    rows = (torch.arange(0, B * K, K)[:, None] + chosen)[absorbed]
    bank.last_step.view(-1)[rows] = step
    bank.absorbed += absorbed.sum(1).view_as(bank.absorbed)
    bank.touch_(rows)
    return Assigned(*made)


@compiled_in_any_order
def _price_(
    costs: Floats, form: Floats, extra: Floats, head: int, token: int, given: _Given, held: _Held, rule: _Rule
) -> None:
    """Equation 1 of some tokens of some heads, from the first ones given: `costs` `[h, n, K]` holds their products."""
    H, N, K = costs.shape
    D = held.keys.shape[2]
    for h in range(H):
        b = head + h
        for k in range(K):
            form[h, 0, k], form[h, 1, k] = held.mean[b, k, 0], held.mean[b, k, 1]
            factors = _factor(held.covariance[b, k, 0], held.covariance[b, k, 1], held.covariance[b, k, 3], rule)
            form[h, 2, k], form[h, 3, k], form[h, 4, k] = factors
            square = np.float32(0)
            for d in range(D):
                square += held.keys[b, k, d] * held.keys[b, k, d]
            form[h, 5, k] = _invert(square)
        for n in range(N):
            x, y = given.coordinates[token + n, 0], given.coordinates[token + n, 1]
            for k in range(K):
                far = _square(x - form[h, 0, k], y - form[h, 1, k], form[h, 2, k], form[h, 3, k], form[h, 4, k])
                costs[h, n, k] = far + extra[b, k] - costs[h, n, k] * form[h, 5, k]


@compiled_in_any_order
def _choose_(
    costs: Floats,
    cheapest: Whole,
    form: Floats,
    extra: Floats,
    head: int,
    token: int,
    taken: Whole,
    given: _Given,
    held: _Held,
    rule: _Rule,
) -> None:
    """Let these tokens choose in order, of equal costs the first prototype, and move what they choose."""
    H, N, K = costs.shape
    D = held.keys.shape[2]
    moved = np.empty(N, np.int64)
    has_moved = np.empty(K, np.bool_)
    for h in range(H):
        b, many = head + h, 0
        has_moved[:] = False
        for n in range(max(0, taken[b] - token), N):
            t = token + n
            x, y = given.coordinates[t, 0], given.coordinates[t, 1]
            best, least = cheapest[h, n], costs[h, n, cheapest[h, n]]
            if has_moved[best]:
                best, least = -1, np.float32(np.inf)
                for k in range(K):
                    if not has_moved[k] and (best < 0 or costs[h, n, k] < least):
                        best, least = k, costs[h, n, k]
            for m in range(many):
                k = moved[m]
                product = np.float32(0)
                for d in range(D):
                    product += given.directions[b, t, d] * held.keys[b, k, d]
                far = _square(x - form[h, 0, k], y - form[h, 1, k], form[h, 2, k], form[h, 3, k], form[h, 4, k])
                cost = far - product * form[h, 5, k]
                if best < 0 or cost < least or (cost == least and k < best):
                    best, least = k, cost
            if not has_moved[best]:
                has_moved[best] = True
                moved[many] = best
                many += 1
                extra[b, best] = 0
            _move_(b, t, best, form[h], given, held, rule)


@compiled_in_any_order
def _move_(b: int, t: int, k: int, form: Floats, given: _Given, held: _Held, rule: _Rule) -> None:
    """Move prototype k of a head towards a token."""
    given.chosen[b, t] = k
    kept, square = np.float32(1) - rule.key_rate, np.float32(0)
    for d in range(held.keys.shape[2]):
        center = kept * held.keys[b, k, d] + rule.key_rate * given.keys[b, t, d]
        held.keys[b, k, d] = center
        given.key_residual[b, t, d] = given.keys[b, t, d] - center
        square += center * center
    kept = np.float32(1) - rule.value_rate
    for d in range(held.keys.shape[2]):
        center = kept * held.values[b, k, d] + rule.value_rate * given.values[b, t, d]
        held.values[b, k, d] = center
        given.value_residual[b, t, d] = given.values[b, t, d] - center
    kept = np.float32(1) - rule.spatial_rate
    for i in range(2):
        held.mean[b, k, i] = kept * held.mean[b, k, i] + rule.spatial_rate * given.coordinates[t, i]
        form[i, k] = held.mean[b, k, i]
    x, y = given.coordinates[t, 0] - form[0, k], given.coordinates[t, 1] - form[1, k]
    xx = kept * held.covariance[b, k, 0] + rule.spatial_rate * (x * x)
    xy = kept * held.covariance[b, k, 1] + rule.spatial_rate * (x * y)
    yy = kept * held.covariance[b, k, 3] + rule.spatial_rate * (y * y)
    held.covariance[b, k, 0], held.covariance[b, k, 3] = xx, yy
    held.covariance[b, k, 1], held.covariance[b, k, 2] = xy, xy
    form[2, k], form[3, k], form[4, k] = _factor(xx, xy, yy, rule)
    form[5, k] = _invert(square)
    held.mass[b, k, 0] += 1
    for p in range(held.position.shape[2]):
        if rule.anchor == 1:
            held.position[b, k, p] = given.positions[t, p]
        elif rule.anchor == 2:
            held.position[b, k, p] += (given.positions[t, p] - held.position[b, k, p]) / held.mass[b, k, 0]


@compiled
def _factor(xx: float, xy: float, yy: float, rule: _Rule) -> tuple[float, float, float]:
    """With Sigma = [[a, b], [b, c]] the squared Mahalanobis distance is x^2 / a + (y - x b / a)^2 / (c - b^2 / a): the
    weighted roots of the two shares, and b / a between them."""
    a = np.float64(xx) + rule.floor
    slope = np.float64(xy) / a
    rest = np.float64(yy) + rule.floor - slope * np.float64(xy)
    return np.sqrt(rule.weight / a), slope, np.sqrt(rule.weight / rest)


@compiled_in_any_order
def _square(dx: np.float32, dy: np.float32, across: np.float32, slope: np.float32, along: np.float32) -> np.float32:
    """The weighted Mahalanobis distance: two squares, which cannot cancel each other."""
    one, other = dx * across, (dy - slope * dx) * along
    return one * one + other * other


@compiled
def _invert(square: np.float32) -> np.float32:
    """1 / |x| of |x|^2; large where x is 0."""
    return np.float32(1 / max(np.sqrt(square), np.float32(1e-12)))
