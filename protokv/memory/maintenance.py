"""Prototype maintenance (Algorithm 2), once a step: age, merge, recycle, for all layers and heads at once.

Merging is greedy over pairs i < j in index order, as the loop of Algorithm 2 is. A pair whose centres have
not moved since it was last found too far apart is not looked at again, which changes nothing. Knows nothing
of residual histograms; `Residuals` is told what died and what was merged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from protokv.config import ProtoKVConfig
from protokv.memory.bank import PrototypeBank
from protokv.memory.continuity import FarTokens

# Distances of one block of the search for merges, and pairs of one block of its test; more are done in turn.
_BLOCK_ELEMENTS = 2**25
_BLOCK_PAIRS = 2**16


class Follower(Protocol):
    """Who keeps statistics by prototype row, flat over `L * H * K`, and follows what happens to it."""

    def freed_(self, rows: Tensor) -> None:
        """These rows hold nothing any more."""

    def merged_(self, into: Tensor, gone: Tensor) -> None:
        """Row `into[x]` takes over what row `gone[x]` has; `gone` is then free. At most one pair a head."""


@dataclass(frozen=True, slots=True)
class Recycler:
    """Where recycled slots take their tokens from.

    Attributes:
        newest: gives the tokens of the newest step that are in the near window; called only when a slot is
            free.
        generator: draws among them; on the CPU, so that every device draws the same.
    """

    newest: Callable[[], FarTokens]
    generator: torch.Generator


def maintain_(
    bank: PrototypeBank, followers: Sequence[Follower], recycler: Recycler, step: int, config: ProtoKVConfig
) -> None:
    """Age, merge and recycle at time `step`."""
    if config.decay == "floor":
        decay_(bank, followers, step, config)
    if config.merge:
        merge_(bank, followers, config)
    if config.recycle:
        recycle_(bank, recycler, step)


def decay_(bank: PrototypeBank, followers: Sequence[Follower], step: int, config: ProtoKVConfig) -> None:
    """n <- floor((1 - gamma) n) for idle prototypes, in whole numbers; mass 0 frees the slot."""
    idle = (bank.mass > 0) & (step - bank.last_step > config.idle_steps)
    kept = config.kept_mass
    less = (bank.mass.long() * kept.numerator).div(kept.denominator, rounding_mode="floor").float()
    died = idle & (less == 0)
    bank.mass.copy_(torch.where(idle, less, bank.mass))
    rows = died.view(-1).nonzero().squeeze(1)
    if len(rows):
        bank.expired += died.sum(2)
        bank.free_(rows)
        for follower in followers:
            follower.freed_(rows)


def merge_(bank: PrototypeBank, followers: Sequence[Follower], config: ProtoKVConfig) -> None:
    """Merge pairs whose root-mean-square distances are below eps_K for keys and eps_V for values.

    All heads go through their pairs i < j side by side, one merge a round. `close` is what is left of row i
    of each head; after a merge it is measured again from the new centre, as the inner loop of Algorithm 2
    would go on. A head whose row is done takes its next one from `pairs`, all of whose centres are as they
    were.
    """
    K = bank.mass.shape[2]
    pairs = _close_pairs(bank, config)
    bank.moved.zero_()
    if not len(pairs):
        return
    alive = (bank.mass > 0).view(-1, K)
    row = torch.zeros(len(alive), dtype=torch.int64, device=pairs.device)
    close = torch.zeros_like(alive)
    while True:
        done = ~close.any(1)
        if len(pairs) and done.any():
            pairs = _next_rows(pairs, done, alive, row, close)
        head = close.any(1).nonzero().squeeze(1)
        if not len(head):
            return
        j = close[head].to(torch.uint8).argmax(1)
        into, gone = head * K + row[head], head * K + j
        _merge_rows(bank, into, gone, config)
        for follower in followers:
            follower.merged_(into, gone)
        alive[head, j] = False
        later = torch.arange(K, device=j.device) > j[:, None]
        close[head] = _close_to(bank, into, later & alive[head], config)


def _next_rows(pairs: Tensor, done: Tensor, alive: Tensor, row: Tensor, close: Tensor) -> Tensor:
    """Give each head that is done its next row; return the pairs that are left. `row` and `close` are written."""
    K = alive.shape[1]
    head, i, j = pairs // (K * K), pairs // K % K, pairs % K
    valid = alive[head, i] & alive[head, j]
    # The lowest row of each head that is done; K where it has no pair left.
    lowest = torch.full_like(row, K).scatter_reduce_(0, head[valid], i[valid], "amin")
    row.copy_(torch.where(done & (lowest < K), lowest, row))
    taken = valid & done[head] & (i == row[head])
    close[head[taken], j[taken]] = True
    return pairs[valid & ~taken]


def _close_pairs(bank: PrototypeBank, config: ProtoKVConfig) -> Tensor:
    """Close pairs i < j of one head, at least one of which moved: sorted codes (head * K + i) * K + j."""
    L, H, K, D = bank.key_center.shape
    B = L * H
    moved = (bank.moved & (bank.mass > 0)).view(B, K)
    most = int(moved.sum(1).max()) if K else 0
    order = moved.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :most]
    keys, alive = bank.key_center.view(B, K, D), (bank.mass > 0).view(B, K)
    norms = keys.square().sum(2)
    head_index = torch.arange(B, device=keys.device)[:, None]
    codes = [order.new_empty(0)]
    block = max(1, _BLOCK_ELEMENTS // (B * K))
    for start in range(0, most, block):
        some = order[:, start : start + block]
        bound = norms[head_index, some][:, :, None] + norms[:, None, :]
        squares = torch.baddbmm(bound, keys[head_index, some], keys.transpose(1, 2), alpha=-2)
        near = _maybe_close(squares, bound, D, config)
        near &= alive[:, None, :] & alive[head_index, some][:, :, None]
        head, row, other = near.nonzero(as_tuple=True)
        one = some[head, row]
        low, high = torch.minimum(one, other), torch.maximum(one, other)
        found = (head * K + low) * K + high
        codes.append(found[low < high])
    pairs: Tensor = torch.unique(torch.cat(codes))
    i, j = pairs // K, pairs // (K * K) * K + pairs % K
    return pairs[_close(bank, i, j, config)]


def _maybe_close(squares: Tensor, bound: Tensor, D: int, config: ProtoKVConfig) -> Tensor:
    """Whether expanded squares |a|^2 + |b|^2 - 2ab, `bound` the first two terms, may be within eps_K.

    They are wrong by rounding; the margin lets through whatever may be close, and `_close` decides.
    """
    return squares <= bound * 1e-5 + D * config.merge_key_distance**2 * 1.001


def _close_to(bank: PrototypeBank, rows: Tensor, others: Tensor, config: ProtoKVConfig) -> Tensor:
    """Which of `others` `[R, K]` bool are close to prototypes `rows` `[R]` of the same heads, `[R, K]` bool."""
    K, D = bank.key_center.shape[2:]
    head = rows // K
    keys = bank.key_center.view(-1, K, D)
    # Without a copy where all heads are at it, as in a scene that stands still.
    keys = keys if len(head) == len(keys) else keys[head]
    center = bank.key_center.view(-1, D)[rows]
    bound = keys.square().sum(2) + center.square().sum(1, keepdim=True)
    squares = torch.baddbmm(bound[:, :, None], keys, center[:, :, None], alpha=-2).squeeze(2)
    maybe = others & _maybe_close(squares, bound, D, config)
    which, other = maybe.nonzero(as_tuple=True)
    maybe[which, other] = _close(bank, rows[which], head[which] * K + other, config)
    return maybe


def _close(bank: PrototypeBank, i: Tensor, j: Tensor, config: ProtoKVConfig) -> Tensor:
    """The merge test for pairs of rows, `[n]` bool."""
    D = bank.key_center.shape[3]
    keys, values = bank.key_center.view(-1, D), bank.value_center.view(-1, D)
    tests = []
    for one, other in zip(torch.split(i, _BLOCK_PAIRS), torch.split(j, _BLOCK_PAIRS), strict=True):
        close = (keys[one] - keys[other]).square().mean(1) < config.merge_key_distance**2
        close &= (values[one] - values[other]).square().mean(1) < config.merge_value_distance**2
        tests.append(close)
    return torch.cat(tests)


def _merge_rows(bank: PrototypeBank, into: Tensor, gone: Tensor, config: ProtoKVConfig) -> None:
    """Merge rows `gone` into `into`, at most one pair a head; the masses before it weight everything."""
    K, D, P = *bank.key_center.shape[2:], bank.position.shape[3]
    mass = bank.mass.view(-1)
    n, m = mass[into, None], mass[gone, None]
    total = n + m

    def weighted(one: Tensor, other: Tensor) -> Tensor:
        return (n * one + m * other) / total

    for center in (bank.key_center.view(-1, D), bank.value_center.view(-1, D)):
        center[into] = weighted(center[into], center[gone])
    mean, covariance = bank.mean.view(-1, 2), bank.covariance.view(-1, 4)
    middle = weighted(mean[into], mean[gone])

    def spread(rows: Tensor) -> Tensor:
        offset = mean[rows] - middle
        return covariance[rows] + (offset[:, :, None] * offset[:, None, :]).flatten(1)

    covariance[into] = weighted(spread(into), spread(gone))
    mean[into] = middle
    position, last_step = bank.position.view(-1, P), bank.last_step.view(-1)
    if config.anchor == "average":
        position[into] = weighted(position[into], position[gone])
    else:
        # The first component is time under M-RoPE and the index of the token under RoPE.
        later = (
            position[gone, 0] > position[into, 0]
            if config.anchor == "recent"
            else position[gone, 0] < position[into, 0]
        )
        position[into] = torch.where(later[:, None], position[gone], position[into])
    last_step[into] = torch.maximum(last_step[into], last_step[gone])
    mass[into] = total[:, 0]
    bank.merged.view(-1)[into // K] += 1
    bank.free_(gone)
    bank.touch_(into)


def recycle_(bank: PrototypeBank, recycler: Recycler, step: int) -> None:
    """Open slots that died or were merged away with distinct tokens of the newest near step, drawn at random.

    Slots that no token has opened yet are left to the evicted tokens. If more slots are free than the step
    has tokens in the window, the highest ones stay free.
    """
    L, H, K = bank.mass.shape
    freed = ((bank.mass == 0) & (bank.last_step >= 0)).view(L * H, K)
    if not freed.any():
        return
    tokens = recycler.newest()
    T = tokens.keys.shape[1]
    if T == 0:
        return
    draw = torch.rand(L * H, T, generator=recycler.generator).argsort(dim=1, stable=True).to(freed.device)
    rank = freed.cumsum(1) - 1
    head, slot = (freed & (rank < T)).nonzero(as_tuple=True)
    token = draw[head, rank[head, slot]]
    rows = head * K + slot
    bank.open_(rows, tokens.keys[head, token], tokens.values[head, token], tokens.seen.at(token), step)
    bank.recycled += (freed & (rank < T)).sum(1).view(L, H)
