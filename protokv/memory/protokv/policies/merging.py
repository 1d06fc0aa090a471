"""Merging of prototypes with close centres (Algorithm 2, the loop over pairs), for all layers and heads at once.

The paper merges "each pair" that is close and leaves the order open. Here a step makes a few passes (`PASSES`) over the
prototypes that have a close one when it begins. In a pass each is compared with those before it in `turns`, all centres
as the pass before has left them: who has no close one before it stays, and the others go into the first of those that
stay and are close, if any. Centres are then those of all mass that came together. What is close after the last pass
waits for the next step. Pairs by themselves, and groups around one centre, come out as the loop over pairs has them.

A loop with the centre as it is after each single merge has no bound but the number of prototypes on what hangs on what:
along a line of centres, each close to the next, every decision waits for the one before. Slots are therefore in no
order of place or time in `turns`, and most of what is close is settled in one or two passes.

A pass has fixed shapes and asks the device for nothing: who merges with whom are matrices over the few prototypes in
question. They are in float64, so that which heads are planned together changes no decision. Knows nothing of residual
histograms; a `Follower` is told what was merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from hashlib import sha256

import torch
from torch import Tensor

from protokv.config import PaperConfig
from protokv.memory.protokv import loops
from protokv.memory.protokv.bank import PrototypeBank, first_of
from protokv.memory.protokv.policies.closeness import find_close, radii_of
from protokv.memory.protokv.policy import Follower, asks_freely
from protokv.memory.rows import add_rows_

# Passes of one step: more settle hardly more (`tests/memory/protokv/test_maintenance.py`).
PASSES = 4


@cache
def turns(slots: int) -> tuple[int, ...]:
    """The order in which the slots of a head come when pairs are merged: without any pattern, and always the same."""
    return tuple(sorted(range(slots), key=lambda slot: sha256(b"%d" % slot).digest()))


def merge_(bank: PrototypeBank, followers: Sequence[Follower], config: PaperConfig, moved: int | None = None) -> int:
    """Merge prototypes whose root-mean-square distances are below eps_K for keys and eps_V for values.

    Args:
        bank: with `moved` set where a centre has changed since this was last called.
        followers: are told.
        config: of the thresholds.
        moved: how many these are in one head at most; None: all may be.

    Returns:
        How many of one head at most are `moved` now.
    """
    K = bank.mass.shape[2]
    moved = K if moved is None else min(moved, K)
    is_on = moved and config.merge_key_distance and config.merge_value_distance
    asked = find_close(bank, moved, config) if is_on else None
    bank.moved.zero_()
    most = 0 if asked is None else int(asked.sum(1).max())
    if asked is None or not most:
        return 0
    rank = _ranks(K, asked.device)
    heads = torch.arange(len(asked), device=asked.device)[:, None]
    rows = heads * K + torch.where(asked, rank, rank + K).argsort(dim=1)[:, :most]
    owner, again = _plan(bank, rows, config)
    gone = _write(bank, rows, owner, config)
    for follower in followers:
        follower.merged_(rows.gather(1, owner).view(-1), rows.view(-1))
    # A centre that changed may be close to any other; what was close and could not be settled is looked at again.
    bank.moved.view(-1)[rows] = again & ~gone
    return rows.shape[1]


@lru_cache(maxsize=32)
def _ranks(slots: int, device: torch.device) -> Tensor:
    """Where each slot stands in `turns`, `[K]`."""
    return torch.tensor(turns(slots), device=device).argsort()


def _plan(bank: PrototypeBank, rows: Tensor, config: PaperConfig) -> tuple[Tensor, Tensor]:
    """For each of `rows` `[B, V]`, which are in order, the place of the one that it is part of then, itself where it
    stays, `[B, V]`; and which had a close one when the step began, `[B, V]` bool."""
    B, V = rows.shape
    D = bank.key_center.shape[3]
    keys, values = bank.centers(rows)
    mass, radii = bank.mass.view(-1)[rows].double(), radii_of(config, keys)
    if loops.serve(bank.mass):
        from protokv.memory.protokv.loops.merging import plan

        return plan((keys, values), mass, radii, PASSES)
    centers = torch.cat((keys, values), 2)
    place = torch.arange(V, device=rows.device)
    heads = torch.arange(0, B * V, V, device=rows.device)[:, None]
    sums, left, owner = centers.double() * mass[..., None], mass > 0, place.repeat(B, 1)
    again = left
    for turn in range(PASSES):
        # Where the host may ask freely, only what is left is looked at again.
        width = int(left.sum(1).max()) if asks_freely(rows) else V
        some = first_of(left, width)
        here, n = some + heads, mass.gather(1, some)
        means = sums.view(B * V, 2 * D)[here] / n.clamp(min=1)[..., None]
        is_left = left.gather(1, some)
        close = is_left[:, :, None] & is_left[:, None]
        for part, radius in zip(torch.split(means, D, 2), radii, strict=True):
            norms = part.square().sum(2)
            squares = torch.baddbmm(norms[:, :, None] + norms[:, None], part, part.transpose(1, 2), alpha=-2)
            close &= squares < radius
        close = close.triu_(1)
        if turn == 0:
            is_left = close.any(1) | close.any(2)
            again = left = torch.zeros_like(left).scatter_(1, some, is_left)
        stays = is_left & ~close.any(1)
        first = torch.where(close & stays[:, :, None], place[:width, None], width).amin(1)
        goes = torch.zeros_like(left).scatter_(1, some, first < width)
        # Where nothing goes in this pass, nothing will in another.
        if asks_freely(rows) and not goes.any():
            break
        joined = torch.where(first < width, some.gather(1, first.clamp(max=width - 1)), some)
        into = place.repeat(B, 1).scatter_(1, some, joined)
        added = (sums * goes[..., None]).view(B * V, 2 * D)
        add_rows_(sums.view(B * V, 2 * D), (heads + into).view(-1), added)
        mass.scatter_add_(1, into, mass * goes)
        left = left & ~goes
        owner = into.gather(1, owner)
    return owner, again


def _write(bank: PrototypeBank, rows: Tensor, owner: Tensor, config: PaperConfig) -> Tensor:
    """Merge `rows` `[B, V]` into the ones at their `owner` `[B, V]`; return which are gone, `[B, V]` bool.

    The masses before the merge weight everything: Sigma is that of all mass together. The anchor is that of the newest
    ("recent"), the oldest ("first"; of equals the first in order) or the mean.
    """
    B, V = rows.shape
    held = {name: getattr(bank, name).flatten(0, 2)[rows].flatten(2) for name in _MEANS}
    mass = bank.mass.view(-1)[rows]
    gone = owner != torch.arange(V, device=rows.device)
    grown = torch.zeros_like(gone).scatter_(1, owner, gone)
    changed = gone | grown
    flat = (torch.arange(0, B * V, V, device=rows.device)[:, None] + owner).view(-1)

    def added_up(parts: list[Tensor]) -> Tensor:
        """Means over all mass that came together, at the place of its owner, `[B, V, F]` float64."""
        weighted = (torch.cat(parts, 2).double() * mass[..., None]).flatten(0, 1)
        sums = torch.zeros_like(weighted)
        add_rows_(sums, flat, weighted)
        return sums.view(B, V, -1) / total.clamp(min=1)[..., None]

    total = torch.zeros_like(mass).scatter_add_(1, owner, mass)
    sizes = [part.shape[2] for part in held.values()]
    means = dict(zip(held, torch.split(added_up(list(held.values())), sizes, 2), strict=True))
    offset = held["mean"] - means["mean"].view(B * V, 2)[flat].view(B, V, 2)
    covariance = bank.covariance.view(-1, 4)[rows]
    spread = covariance.double() + (offset[..., :, None] * offset[..., None, :]).flatten(2)
    means["covariance"] = added_up([spread])
    if config.anchor != "average":
        means["position"] = _anchors(held["position"], owner, newest=config.anchor == "recent")
    for name, mean in means.items():
        tensor = getattr(bank, name).flatten(3)
        old = held.get(name, covariance)
        new = torch.where(changed[..., None], mean, old).masked_fill_(gone[..., None], 0.0)
        tensor.view(-1, tensor.shape[3])[rows] = new.to(tensor.dtype)
    bank.mass.view(-1)[rows] = torch.where(gone, 0, total)
    last_step = bank.last_step.view(-1)[rows]
    newest = last_step.scatter_reduce(1, owner, last_step, "amax")
    bank.last_step.view(-1)[rows] = torch.where(gone, last_step, newest)
    bank.merged += gone.sum(1).view_as(bank.merged)
    bank.stale.view(-1)[rows] |= changed
    bank.note_(rows.view(-1))
    return gone


def _anchors(position: Tensor, owner: Tensor, *, newest: bool) -> Tensor:
    """Of all that came together the newest or the oldest position `[B, V, P]`, at the place of the owner."""
    # The first component is time under M-RoPE and the index of the token under RoPE.
    time = position[..., 0] if newest else -position[..., 0]
    best = time.scatter_reduce(1, owner, time, "amax")
    place = torch.arange(owner.shape[1], device=owner.device)
    is_best = time == best.gather(1, owner)
    first = torch.full_like(owner, owner.shape[1] - 1)
    first.scatter_reduce_(1, owner, torch.where(is_best, place, owner.shape[1] - 1), "amin")
    return position.gather(1, first[..., None].expand_as(position))


_MEANS = ("key_center", "value_center", "mean", "position")
