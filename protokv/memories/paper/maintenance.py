"""Maintenance of a bank (Algorithm 2): age, merge, recycle.

The paper merges "each pair" of close prototypes and leaves the order open. Settled: a step makes
`MERGE_PASSES` passes over prototypes with a close one, by `make_paper_merge_order`. In a pass, a
prototype without a close one before it stays, and the others go into the first one that stays and
is close to them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from hashlib import sha256

import torch
from torch import Tensor

from protokv.core.bank import FarTokens
from protokv.core.tensors import MemoryShape
from protokv.device.arrays import add_rows_
from protokv.memories.paper.bank import PaperBank, leave_out_uncounted
from protokv.memories.paper.residuals import ResidualStats
from protokv.memories.paper.settings import PaperConfig

# Passes of merging in one step; more passes settle hardly more pairs.
MERGE_PASSES = 4


def decay_masses_(
    bank: PaperBank, residuals: ResidualStats | None, step: int, config: PaperConfig
) -> None:
    """n <- floor((1 - gamma) n) for idle prototypes, in whole numbers; mass 0 frees the slot."""
    age = step - bank.last_step
    idle = (bank.mass > 0) & (age > config.idle_steps)
    if config.decay == "interval":
        idle &= (age - 1) % max(1, config.idle_steps) == 0
    kept = config.kept_mass
    less = (bank.mass * kept.numerator).div(kept.denominator, rounding_mode="floor")
    bank.mass.copy_(torch.where(idle, less, bank.mass))
    died = idle & (less == 0)
    bank.expired += died.sum(2)
    rows = died.view(-1).nonzero().squeeze(1)
    bank.free_(rows)
    if residuals is not None:
        residuals.freed_(rows)


@cache
def make_paper_merge_order(slots: int) -> tuple[int, ...]:
    """Return the order in which the slots of a head are looked at for merging: without any pattern,
    always the same.

    By place, along a line of centres each close to the next, every decision would wait for the one
    before.
    """
    return tuple(sorted(range(slots), key=lambda slot: sha256(b"%d" % slot).digest()))


def merge_close_(
    bank: PaperBank, moved: Tensor, residuals: ResidualStats | None, config: PaperConfig
) -> None:
    """Merge prototypes whose root-mean-square distances are below eps_K for keys and below eps_V
    for values.

    `moved` `[L * H, K]` bool are the prototypes that moved since the last search; on return those
    to search next time.
    """
    K = bank.mass.shape[2]
    rank = torch.tensor(make_paper_merge_order(K), device=moved.device).argsort()
    for head in range(len(moved)):
        slots = _find_close(bank, head, moved[head], config)
        moved[head] = False
        if not len(slots):
            continue
        slots = slots[rank[slots].argsort()]
        rows = head * K + slots
        owner, had_close = _plan_merges(bank, rows, config)
        stays = owner == torch.arange(len(owner), device=owner.device)
        # Pairs that the passes did not settle are searched again in the next step.
        moved[head, slots] = had_close & stays
        _write_merged(bank, rows, owner, config)
        if residuals is not None:
            residuals.merged_(rows[owner][~stays], rows[~stays])
        bank.free_(rows[~stays])
        bank.merged.view(-1)[head] += (~stays).sum()


def _find_close(bank: PaperBank, head: int, moved: Tensor, config: PaperConfig) -> Tensor:
    """Return the slots `[v]` of a head that may be close to another one; one of each pair has
    `moved` `[K]`.

    The squared distances are float32 products, so a margin lets through all that are close;
    `_plan_merges` decides.
    """
    alive = bank.mass.flatten(0, 1)[head] > 0
    asking = (moved & alive).nonzero().squeeze(1)
    near = alive.expand(len(asking), -1) & (
        asking[:, None] != torch.arange(len(alive), device=alive.device)
    )
    keys = bank.key_center.flatten(0, 1)[head]
    values = bank.value_center.flatten(0, 1)[head]
    for centers, most in ((keys, config.merge_key_distance), (values, config.merge_value_distance)):
        norms = centers.square().sum(1) * (1 - 1e-5)
        squares = torch.addmm(norms, centers[asking], centers.T, alpha=-2).add_(norms[asking, None])
        near &= squares < 1.001 * most**2 * keys.shape[1]
        some = near.any(1)
        asking = asking[some]
        near = near[some]
    found = near.any(0)
    found[asking] = True
    return found.nonzero().squeeze(1)


def _plan_merges(bank: PaperBank, rows: Tensor, config: PaperConfig) -> tuple[Tensor, Tensor]:
    """Plan all passes over prototypes `rows` `[v]` of one head, in merge order. In float64: large
    groups stay exact.

    Returned are of each the index in `rows` of what it is part of in the end, and whether it had a
    close one at first.
    """
    keys, values = bank.centers(rows)
    D = keys.shape[1]
    mass = bank.mass.view(-1)[rows].double()
    sums = torch.cat((keys, values), 1) * mass[:, None]
    owner = left = torch.arange(len(rows), device=rows.device)
    had_close = torch.zeros_like(left, dtype=torch.bool)
    for turn in range(MERGE_PASSES):
        means = sums[left] / mass[left, None]
        close = _within(means[:, :D], config.merge_key_distance) & _within(
            means[:, D:], config.merge_value_distance
        )
        # Each with those before it.
        close = close.triu(1)
        if turn == 0:
            had_close = close.any(0) | close.any(1)
            left = left[had_close]
            close = close[had_close][:, had_close]
        stays = ~close.any(0)
        takers = close & stays[:, None]
        goes = takers.any(0)
        if not goes.any():
            break
        # The first of several takers.
        into = left[takers[:, goes].byte().argmax(0)]
        gone = left[goes]
        add_rows_(sums, into, sums[gone])
        add_rows_(mass, into, mass[gone])
        heir = torch.arange(len(rows), device=rows.device)
        heir[gone] = into
        owner = heir[owner]
        left = left[~goes]
    return owner, had_close


def _within(points: Tensor, most: float) -> Tensor:
    """Return which pairs of points `[v, D]` have a root-mean-square distance below `most`, `[v, v]`
    bool.
    """
    distance: Tensor = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    return distance.lt(most * points.shape[1] ** 0.5)


def _write_merged(bank: PaperBank, rows: Tensor, owner: Tensor, config: PaperConfig) -> None:
    """Make each owner what it is together with its members; `rows` and `owner` `[v]` are those of
    `_plan_merges`.

    The masses before the merge weight everything; Sigma is moment-matched. Of equal anchors the
    first in order stays.
    """
    grown = torch.bincount(owner)[owner] > 1
    targets, group = torch.unique(rows[owner][grown], return_inverse=True)
    rows = rows[grown]
    mass = bank.mass.view(-1)[rows]
    total = torch.zeros_like(targets).index_add_(0, group, mass)

    mean = bank.mean.flatten(0, 2)[rows].double()
    moments = bank.covariance.flatten(0, 2)[rows] + mean[:, :, None] * mean[:, None]
    position = bank.position.flatten(0, 2)[rows]
    parts = (*bank.centers(rows), mean, moments.flatten(1), position)
    columns = torch.cat(parts, 1) * mass[:, None]
    sums = columns.new_zeros(len(targets), columns.shape[1])
    add_rows_(sums, group, columns)
    sizes = [part.shape[1] for part in parts]
    keys, values, mean, moments, anchor = (sums / total[:, None]).split_with_sizes(sizes, 1)
    if config.anchor != "average":
        # The first component is time under M-RoPE and the index of the token under RoPE.
        newest_first = position[:, 0].argsort(descending=config.anchor == "recent", stable=True)
        place = torch.arange(len(rows), device=rows.device)
        best = torch.full_like(targets, len(rows)).scatter_reduce_(
            0, group[newest_first], place, "amin"
        )
        anchor = position[newest_first[best]]
    spread = moments.view(-1, 2, 2) - mean[:, :, None] * mean[:, None]
    bank.put_centers_(targets, keys.float(), values.float())
    bank.mean.flatten(0, 2)[targets] = mean.float()
    bank.covariance.flatten(0, 2)[targets] = spread.float()
    bank.position.flatten(0, 2)[targets] = anchor
    last_step = bank.last_step.view(-1)
    last_step[targets] = torch.full_like(targets, -1).scatter_reduce_(
        0, group, last_step[rows], "amax"
    )
    bank.mass.view(-1)[targets] = total
    bank.touch_(targets)


def recycle_(
    bank: PaperBank, newest: Callable[[], FarTokens], seed: int, step: int, shape: MemoryShape
) -> Tensor:
    """Open slots that died or were merged away with distinct tokens of the newest near step; return
    the rows `[n]`.

    Slots that no token has opened yet are left to evicted tokens. If there are too few tokens, the
    highest stay free.
    """
    K = bank.mass.shape[2]
    freed = ((bank.mass == 0) & (bank.last_step >= 0)).flatten(0, 1)
    heads = freed.any(1).nonzero().squeeze(1).tolist()
    opened = [freed.new_empty(0, dtype=torch.int64)]
    if not heads:
        return opened[0]
    tokens = leave_out_uncounted(newest())
    order = (
        _draw(seed, step, shape, tokens.keys.shape[1]).argsort(dim=1, stable=True).to(freed.device)
    )
    for head in heads:
        slots = freed[head].nonzero().squeeze(1)[: order.shape[1]]
        token = order[head, : len(slots)]
        rows = head * K + slots
        bank.open_(rows, tokens, head, token, step)
        bank.recycled.view(-1)[head] += len(slots)
        opened.append(rows)
    return torch.cat(opened)


def _draw(seed: int, step: int, shape: MemoryShape, tokens: int) -> Tensor:
    """Draw numbers in [0, 1) for each head and token, `[L * H, T]` float32 on the CPU, by seed and
    step alone.
    """
    # Some layers of a model draw what the whole model draws for them.
    generator = torch.Generator().manual_seed(make_paper_seed(seed, step))
    return torch.rand(shape.model_layers, shape.kv_heads, tokens, generator=generator)[
        shape.own_layers
    ].flatten(0, 1)


def make_paper_seed(seed: int, step: int) -> int:
    """Return a seed for one step of a stream: 63 bits of the sha256 of both numbers."""
    return int.from_bytes(sha256(f"{seed} {step}".encode()).digest()[:8], "little") >> 1
