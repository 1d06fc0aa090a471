"""Carrying a plan out: some of its merges at once, in every head, and tokens in the slots that they leave.

A merge moves a centre towards what joins it, c + (m / M) (x - c), with M the mass of all that the step brings together:
the mean of all members. Masses are whole numbers. Nothing depends on the order in which a device adds: what joins one
prototype is added one after the other in the order of the plan.
"""

from __future__ import annotations

import torch
from torch import Tensor

from protokv.memory.protokv.bank import PrototypeBank
from protokv.memory.protokv.policy import FarTokens
from protokv.memory.rows import draw_rows_

# Later than any position.
_NEVER = 1 << 40


def merge_(bank: PrototypeBank, moves: Tensor, anchor: str, line: Tensor) -> None:
    """Merge rows into others; what stood in them is to be overwritten.

    Args:
        bank: changed.
        moves: `[2, B, n]` int64, rows that others go into, as often as these do; and those that go into them, each at
            most once and none of the former, of the same head. A free one brings nothing.
        anchor: of `DurableConfig`: which position a merged prototype has.
        line: 0, 1, ..., one for each of `moves`.
    """
    moves = moves.flatten(1)
    one, other = moves
    mass = bank.mass.view(-1)
    own = mass.index_select(0, other)
    mass.index_add_(0, one, own)
    share = (own / mass.index_select(0, one).clamp_(min=1))[:, None]
    bank.draw_centers_(moves, share)
    draw_rows_(bank.mean.flatten(0, 2), moves, share)
    step = bank.last_step.view(-1)
    step.scatter_reduce_(0, one, step.index_select(0, other), "amax")
    position = bank.position.flatten(0, 2)
    if anchor == "average":
        draw_rows_(position, moves, share.double())
        return
    # The first component is time under M-RoPE and the index of the token under RoPE.
    places = position.index_select(0, moves.view(-1))
    times = places[:, 0].long()
    if anchor == "first":
        times[len(one) :].masked_fill_(own == 0, _NEVER)
        times.neg_()
    # The greatest of all that come together, of equal ones the first: the least of one number tells which it is.
    bits = len(line).bit_length()
    numbers = torch.sub(line, times, alpha=1 << bits)
    least = torch.empty_like(mass)
    least.scatter_reduce_(0, one, numbers.view_as(moves).amin(0), "amin", include_self=False)
    chosen = least.index_select(0, one).bitwise_and_((1 << bits) - 1)
    position.index_copy_(0, one, places.index_select(0, chosen))


def place_(bank: PrototypeBank, rows: Tensor, tokens: FarTokens, part: slice, step: int) -> None:
    """Put some of the tokens into rows `[B, n]` of the bank, each alone: what stood there is gone. Where a token was
    dropped the row is free then."""
    usable = tokens.usable[part] if tokens.usable is not None else torch.ones_like(rows[0], dtype=torch.bool)
    mass = usable.long()
    seen = tokens.seen.at(part)
    given = {
        "mean": seen.coordinates * usable[:, None],
        "position": seen.positions * usable[:, None],
        "mass": mass,
        "last_step": torch.rsub(mass, -1, alpha=-(step + 1)),
    }
    for name, new in given.items():
        getattr(bank, name).flatten(0, 2).index_put_((rows,), new)
    keys, values = (new[:, part].flatten(0, 1) for new in (tokens.keys, tokens.values))
    bank.put_centers_(rows.view(-1), keys, values)
