"""Carrying a plan out: some of its merges at once, in every head, and tokens in the slots that they leave.

A merge moves a centre towards what joins it, c + (m / M) (x - c), with M the mass of all that the step brings together:
the mean of all members. Masses are whole numbers. Nothing depends on the order in which a device adds: what joins one
prototype is added one after the other in the order of the plan.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from protokv.memory.protokv.policy import FarTokens


class Prototypes(Protocol):
    """What of a bank takes part: see `PrototypeBank`."""

    key_center: Tensor
    value_center: Tensor
    mass: Tensor
    mean: Tensor
    position: Tensor
    last_step: Tensor


def merge_(bank: Prototypes, gone: Tensor, into: Tensor, usable: Tensor, anchor: str) -> None:
    """Merge slots `gone` `[B, n]` into `into` `[B, n]`, B = L * H; what stood in `gone` is to be overwritten.

    Args:
        bank: changed.
        gone: each slot at most once in a head, and none of `into`.
        into: int64, a slot as often as others go into it.
        usable: `[n]` bool; the other merges are not made.
        anchor: of `DurableConfig`: which position a merged prototype has.
    """
    B, n = gone.shape
    K = bank.mass.shape[2]
    head = torch.arange(B, device=gone.device)[:, None] * K
    source, target = (head + gone).view(-1), (head + into).view(-1)
    mass = bank.mass.view(-1)
    made = usable.expand(B, n).reshape(-1)
    own = mass.index_select(0, source) * made
    mass.index_put_((target,), own, accumulate=True)
    share = (own.double() / mass.index_select(0, target).clamp(min=1).double())[:, None]
    for center in (bank.key_center, bank.value_center, bank.mean):
        _draw_(center.view(B * K, -1), source, target, share.to(center.dtype))
    together = (into[:, :, None] == into[:, None, :]) & (own > 0).view(B, 1, n)
    step = bank.last_step.view(-1)
    newest = (together * step.index_select(0, source).view(B, 1, n)).amax(2).view(-1)
    step.index_copy_(0, target, torch.maximum(newest, step.index_select(0, target)))
    position = bank.position.view(B * K, -1)
    if anchor == "average":
        _draw_(position, source, target, share.to(position.dtype))
        return
    # The first component is time under M-RoPE and the index of the token under RoPE.
    sign = 1 if anchor == "recent" else -1
    times = sign * position[:, 0]
    offered = times.index_select(0, source).view(B, 1, n)
    best, which = offered.masked_fill(~together, -torch.inf).max(2)
    chosen = source.view(B, n).gather(1, which).view(-1)
    better = best.view(-1) > times.index_select(0, target)
    rows = torch.where(better, chosen, target)
    position.index_copy_(0, target, position.index_select(0, rows))


def place_(bank: Prototypes, rows: Tensor, tokens: FarTokens, part: slice, step: int) -> None:
    """Put some of the tokens into rows `[B * n]` of the bank, each alone: what stood there is gone. Of a token that was
    dropped the row stays as it is."""
    keys, values = tokens.keys[:, part], tokens.values[:, part]
    B, n, D = keys.shape
    seen = tokens.seen.at(part)
    given = {
        "key_center": keys.reshape(-1, D),
        "value_center": values.reshape(-1, D),
        "mean": seen.coordinates.expand(B, n, -1).reshape(B * n, -1),
        "position": seen.positions.expand(B, n, -1).reshape(B * n, -1),
        "mass": torch.ones_like(rows),
        "last_step": torch.full_like(rows, step),
    }
    usable = None if tokens.usable is None else tokens.usable[part].expand(B, n).reshape(-1)
    for name, new in given.items():
        held = getattr(bank, name).flatten(0, 2)
        new = new.to(held.dtype)
        if usable is not None:
            new = torch.where(usable.view(-1, *[1] * (held.ndim - 1)), new, held.index_select(0, rows))
        held.index_copy_(0, rows, new)


def _draw_(center: Tensor, source: Tensor, target: Tensor, share: Tensor) -> None:
    """Move rows `target` `[m]` of `[B * K, F]` by `share` `[m, 1]` of the way to rows `source`, all at once."""
    way = (center.index_select(0, source) - center.index_select(0, target)).mul_(share)
    center.index_put_((target,), way, accumulate=True)
