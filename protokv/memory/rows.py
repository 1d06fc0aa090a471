"""Writing whole rows of a tensor, adding to them, and moving them towards each other."""

from __future__ import annotations

import torch
from torch import Tensor

_WIDE = torch.complex128


def write_rows_(held: Tensor, rows: Tensor, new: Tensor) -> None:
    """Write `new` `[n, F]` or `[n]` into rows `[n]` of `held` `[N, F]` or `[N]`.

    In pieces as wide as there are where rows consist of such: a CPU moves one element after the other.
    """
    if held.ndim == 2 and held.shape[1] * held.itemsize % _WIDE.itemsize == 0:
        # A single row has any stride; a flat view has its own.
        held = held.view(_WIDE)
        new = new.reshape(-1).view(_WIDE).view(-1, held.shape[1])
    held.index_copy_(0, rows, new)


def add_rows_(held: Tensor, rows: Tensor, new: Tensor) -> None:
    """Add `new` `[n, F]` to rows `[n]` of `held` `[N, F]`; where several go to one row, always in the same order."""
    if held.device.type == "cpu":
        # One after the other; threads that accumulate into one row add in any order.
        held.index_add_(0, rows, new)
    else:
        held.index_put_((rows,), new, accumulate=True)


def draw_rows_(held: Tensor, moves: Tensor, share: Tensor) -> None:
    """Move rows `moves[0]` `[n]` of `held` `[N, F]` by `share` `[n, 1]` of the way to rows `moves[1]`, together."""
    here, there = held.index_select(0, moves.view(-1)).view(*moves.shape, -1)
    add_rows_(held, moves[0], (there - here).mul_(share))
