"""Writing whole rows of a tensor, and adding to them."""

from __future__ import annotations

import torch
from torch import Tensor

_WIDE = torch.complex128


def write_rows_(held: Tensor, rows: Tensor, new: Tensor) -> None:
    """Write `new` `[n, F]` or `[n]` into rows `[n]` of `held` `[N, F]` or `[N]`.

    In pieces as wide as there are where rows consist of such: a CPU moves one element after the other.
    """
    if held.ndim == 2 and held.shape[1] * held.itemsize % _WIDE.itemsize == 0:
        held, new = held.view(_WIDE), new.contiguous().view(_WIDE)
    held.index_copy_(0, rows, new)


def add_rows_(held: Tensor, rows: Tensor, new: Tensor) -> None:
    """Add `new` `[n, F]` to rows `[n]` of `held` `[N, F]`; where several go to one row, always in the same order."""
    if held.device.type == "cpu":
        # One after the other; threads that accumulate into one row add in any order.
        held.index_add_(0, rows, new)
    else:
        held.index_put_((rows,), new, accumulate=True)
