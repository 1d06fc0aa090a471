"""Merging of prototypes with close centres (Algorithm 2, the loop over pairs), for all layers and heads at once.

The result is that of the loop over pairs i < j in index order, inner loop from the centre as it is by then. Three
facts let most of it run side by side. A prototype takes over others only in its own turn and only from above, so in
the turn of i every j > i still has the centre it came with: turns touch each other only through who is gone. A pair
whose centres have not moved since it was last found too far apart need not be looked at. And a centre that has moved
by d reaches no farther than the threshold + d, so the prototypes near a turn's own are all it can ever take over.
Turns that share none of these run side by side, on copies; what they found is then done to the bank. Where a centre
drifts farther than was allowed for, its head is planned again with more allowance.

Knows nothing of residual histograms; a `Follower` is told what was merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from protokv.config import PaperConfig
from protokv.memory.protokv.bank import PrototypeBank
from protokv.memory.protokv.policy import Follower

# Products of one block of the search for pairs, and pairs of one block of their test; more are done in turn.
_BLOCK_ELEMENTS = 2**25
_BLOCK_PAIRS = 2**16
# Components that are looked at first, where there are at least twice as many; and of how many prototypes one may be
# near another in these.
_COMPONENTS, _FEW = 32, 16
# How far a turn looks at first, in thresholds: two centres of equal mass meet half-way.
_REACH = 1.5
# Candidates that a turn looks at in one go; twice as many after each time that none of them was close.
_WIDTH = 32


def merge_(bank: PrototypeBank, followers: Sequence[Follower], config: PaperConfig) -> None:
    """Merge pairs whose root-mean-square distances are below eps_K for keys and eps_V for values."""
    K = bank.mass.shape[2]
    alive = (bank.mass > 0).view(-1, K)
    one, other = _near(bank, bank.moved.view(-1, K) & alive, alive, 1.0, config)
    bank.moved.zero_()
    if not len(one):
        return
    close = _tested(bank, one, other, config)
    one, other = one[close], other[close]
    # Pairs of rows i < j, each once, sorted: row * K + j.
    pairs = torch.unique(torch.minimum(one, other) * K + torch.maximum(one, other) % K)
    reach = _REACH
    while len(pairs):
        merges = _plan(bank, pairs, reach, config)
        for depth in range(int(merges.depth.max()) + 1 if len(merges.depth) else 0):
            chosen = merges.depth == depth
            into, gone = merges.into[chosen], merges.gone[chosen]
            _merge_rows(bank, into, gone, config)
            for follower in followers:
                follower.merged_(into, gone)
        pairs = pairs[merges.lost[pairs // (K * K)]]
        reach *= 2


@dataclass(frozen=True, slots=True)
class _Merges:
    """What the turns found: rows `into` and `gone` `[n]`, sorted by `into`; `depth` counts the merges of one turn.

    `lost` `[L * H]` bool are the heads that must be planned again, of which nothing is listed.
    """

    into: Tensor
    gone: Tensor
    depth: Tensor
    lost: Tensor


def _plan(bank: PrototypeBank, pairs: Tensor, reach: float, config: PaperConfig) -> _Merges:
    """Go through the turns of all rows that have a close pair, looking no farther than `reach` thresholds.

    `turn` is the row whose turn it is in each group of rows that may meet; `key`, `value` and `mass` are what it has
    become, `next_` and `end` the part of its candidates that it has not seen. A group whose turn is over takes its
    next one from `pairs`, as long as it is `waiting` for one.
    """
    K, D = bank.key_center.shape[2:]
    keys, values, masses = bank.key_center.view(-1, D), bank.value_center.view(-1, D), bank.mass.view(-1)
    alive = masses > 0
    never = len(masses)
    low, high = pairs // K, pairs // (K * K) * K + pairs % K
    one, other = _candidates(bank, low, reach, config)
    names, group = torch.unique(_components(one, other, never)[low], return_inverse=True)
    turn = torch.full_like(names, -1)
    next_, end, width, depth = (torch.zeros_like(turn) for _ in range(4))
    waiting = torch.ones_like(turn, dtype=torch.bool)
    key, value, mass = keys.new_zeros(len(names), D), keys.new_zeros(len(names), D), masses.new_zeros(len(names), 1)
    lost = torch.zeros(never // K, dtype=torch.bool, device=pairs.device)
    found = [torch.stack((turn[:0], turn[:0], turn[:0]))]

    while True:
        if (waiting & (next_ == end)).any():
            left = (alive[low] & alive[high] & ~lost[low // K]).nonzero().squeeze(1)
            low, high, group = low[left], high[left], group[left]
            lowest = torch.full_like(turn, never).scatter_reduce_(0, group, low, "amin")
            waiting = lowest < never
            fresh = (waiting & (next_ == end)).nonzero().squeeze(1)
            row = lowest[fresh]
            turn[fresh], width[fresh], depth[fresh] = row, _WIDTH, 0
            next_[fresh], end[fresh] = torch.searchsorted(one, row), torch.searchsorted(one, row, right=True)
            key[fresh], value[fresh], mass[fresh] = keys[row], values[row], masses[row, None]
            left = (low != turn[group]).nonzero().squeeze(1)
            low, high, group = low[left], high[left], group[left]
        at = (next_ < end).nonzero().squeeze(1)
        if not len(at):
            break
        # Of the next candidates of these turns, the first one that is close to what the row has become.
        count = torch.minimum(end[at] - next_[at], width[at])
        which = torch.arange(len(at), device=at.device).repeat_interleave(count)
        place = torch.arange(len(which), device=at.device) + (next_[at] - count.cumsum(0) + count)[which]
        seen = alive[other[place]].nonzero().squeeze(1)
        which, place = which[seen], place[seen]
        j = other[place]
        close = _is_close(key[at[which]], keys[j], value[at[which]], values[j], 1.0, config)
        first = torch.full_like(at, len(other)).scatter_reduce_(0, which[close], place[close], "amin")
        hit = first < len(other)
        next_[at] = torch.where(hit, first + 1, next_[at] + count)
        width[at] = torch.where(hit, _WIDTH, 2 * width[at])
        at, j = at[hit], other[first[hit]]
        if not len(at):
            continue
        found.append(torch.stack((turn[at], j, depth[at])))
        n, m = mass[at], masses[j, None]
        key[at], value[at] = _weighted(n, m, key[at], keys[j]), _weighted(n, m, value[at], values[j])
        mass[at] = n + m
        alive[j] = False
        depth[at] += 1
        # The allowance is kept a little short of what was looked at, for rounding.
        row = turn[at]
        kept = _is_close(key[at], keys[row], value[at], values[row], 0.999 * (reach - 1), config)
        if not kept.all():
            lost[row[~kept] // K] = True
            next_ = torch.where(lost[turn // K], end, next_)

    into, gone, depths = torch.cat(found, 1)
    order = into.argsort(stable=True)
    order = order[~lost[into[order] // K]]
    return _Merges(into[order], gone[order], depths[order], lost)


def _candidates(bank: PrototypeBank, rows: Tensor, reach: float, config: PaperConfig) -> tuple[Tensor, Tensor]:
    """Each of `rows` with every row above it that it may come to: two lists, sorted by the first, then the second."""
    K = bank.mass.shape[2]
    alive = (bank.mass > 0).view(-1, K)
    chosen = torch.zeros_like(alive)
    chosen.view(-1)[rows] = True
    one, other = _near(bank, chosen, alive, reach, config)
    codes = (one * K + other % K)[other > one].sort().values
    return codes // K, codes // (K * K) * K + codes % K


def _components(one: Tensor, other: Tensor, rows: int) -> Tensor:
    """The lowest row that each of `rows` is connected with by pairs (one, other)."""
    label = torch.arange(rows, device=one.device)
    while True:
        lower = torch.minimum(label[one], label[other])
        new = label.scatter_reduce(0, one, lower, "amin").scatter_reduce_(0, other, lower, "amin")
        new = new[new]
        if torch.equal(new, label):
            return label
        label = new


def _near(
    bank: PrototypeBank, chosen: Tensor, alive: Tensor, reach: float, config: PaperConfig
) -> tuple[Tensor, Tensor]:
    """Pairs of rows of one head, the first of `chosen` `[L * H, K]`, the other alive, with all whose keys are within
    `reach` thresholds, and some more.

    |a - b|^2 <= r is a b - h(b) >= h(a) with h(x) = |x|^2 / 2 - r / 4: one product and its largest entry a row. It is
    wrong by rounding; the margin lets through whatever may be within. Two keys are not nearer than in some of their
    components, so few of these are looked at first, and all only where many prototypes are that near.
    """
    L, H, K, D = bank.key_center.shape
    keys = bank.key_center.view(L * H, K, D)
    most = int(chosen.sum(1).max()) if K else 0
    order = chosen.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :most]
    radius = D * (reach * config.merge_key_distance) ** 2 * 1.001
    found = None
    if D >= 2 * _COMPONENTS:
        some = keys[:, :, :: D // _COMPONENTS].contiguous()
        found = _within(some, order, chosen, alive, radius, L * H * most // _FEW)
    if found is None:
        found = _within(keys, order, chosen, alive, radius, L * H * most)
    assert found is not None
    return found


def _within(
    keys: Tensor, order: Tensor, chosen: Tensor, alive: Tensor, radius: float, most: int
) -> tuple[Tensor, Tensor] | None:
    """The pairs of `_near` by `keys` `[B, K, F]`, squared distances up to `radius`; `order` `[B, n]` has all that are
    `chosen`. None where more than `most` of them are near another one."""
    B, K, _ = keys.shape
    half = keys.square().sum(2) * (0.5 * (1 - 1e-5)) - radius / 4
    threshold, offset = half.masked_fill(~chosen, torch.inf), half.masked_fill(~alive, torch.inf)[:, None]
    index = torch.arange(B, device=keys.device)[:, None]
    found = [order.new_empty(2, 0)]
    block = max(1, _BLOCK_ELEMENTS // (B * K)) if K else 1
    for start in range(0, order.shape[1], block):
        some = order[:, start : start + block]
        product = torch.baddbmm(offset, keys[index, some], keys.transpose(1, 2), beta=-1)
        product.scatter_(2, some[..., None], -torch.inf)
        least = threshold[index, some]
        head, place = (product.amax(2) >= least).nonzero(as_tuple=True)
        if not len(head):
            continue
        if len(head) > most:
            return None
        which, j = (product[head, place] >= least[head, place, None]).nonzero(as_tuple=True)
        head, place = head[which], place[which]
        found.append(torch.stack((head * K + some[head, place], head * K + j)))
    one, other = torch.cat(found, 1)
    return one, other


def _tested(bank: PrototypeBank, one: Tensor, other: Tensor, config: PaperConfig) -> Tensor:
    """Which pairs of rows `[n]` are close, `[n]` bool."""
    D = bank.key_center.shape[3]
    keys, values = bank.key_center.view(-1, D), bank.value_center.view(-1, D)
    tests = [
        _is_close(keys[i], keys[j], values[i], values[j], 1.0, config)
        for i, j in zip(torch.split(one, _BLOCK_PAIRS), torch.split(other, _BLOCK_PAIRS), strict=True)
    ]
    return torch.cat(tests)


def _is_close(
    key: Tensor, other_key: Tensor, value: Tensor, other_value: Tensor, reach: float, config: PaperConfig
) -> Tensor:
    """The merge test for pairs of centres `[n, D]`, both thresholds times `reach`; `[n]` bool."""
    close = (key - other_key).square().mean(1) < (reach * config.merge_key_distance) ** 2
    return close & ((value - other_value).square().mean(1) < (reach * config.merge_value_distance) ** 2)


def _weighted(n: Tensor, m: Tensor, one: Tensor, other: Tensor) -> Tensor:
    return (n * one + m * other) / (n + m)


def _merge_rows(bank: PrototypeBank, into: Tensor, gone: Tensor, config: PaperConfig) -> None:
    """Merge rows `gone` into `into`, no row in two of the pairs; the masses before it weight everything."""
    K, D, P = *bank.key_center.shape[2:], bank.position.shape[3]
    mass = bank.mass.view(-1)
    n, m = mass[into, None], mass[gone, None]
    for center in (bank.key_center.view(-1, D), bank.value_center.view(-1, D)):
        center[into] = _weighted(n, m, center[into], center[gone])
    mean, covariance = bank.mean.view(-1, 2), bank.covariance.view(-1, 4)
    middle = _weighted(n, m, mean[into], mean[gone])

    def spread(rows: Tensor) -> Tensor:
        offset = mean[rows] - middle
        return covariance[rows] + (offset[:, :, None] * offset[:, None, :]).flatten(1)

    covariance[into] = _weighted(n, m, spread(into), spread(gone))
    mean[into] = middle
    position, last_step = bank.position.view(-1, P), bank.last_step.view(-1)
    if config.anchor == "average":
        position[into] = _weighted(n, m, position[into], position[gone])
    else:
        # The first component is time under M-RoPE and the index of the token under RoPE.
        later = (
            position[gone, 0] > position[into, 0]
            if config.anchor == "recent"
            else position[gone, 0] < position[into, 0]
        )
        position[into] = torch.where(later[:, None], position[gone], position[into])
    last_step[into] = torch.maximum(last_step[into], last_step[gone])
    mass[into] = (n + m)[:, 0]
    bank.merged.view(-1).index_add_(0, into // K, torch.ones_like(into))
    bank.free_(gone)
    bank.touch_(into)
