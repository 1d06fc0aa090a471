"""Writing whole rows of a tensor, adding to them, and moving them towards each other.

Sorting along an axis, and medians. Numbers that are all different have one order, whoever sorts them.

A CPU sorts with numpy, whose sort works on vectors: up to ten times as fast as torch's.

How much is done at once. What is done gives the same result whichever it is; knows nothing of what that is.
"""

from __future__ import annotations

from collections.abc import Iterator

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


def sorted_from(numbers: Tensor, dim: int = -1) -> Tensor:
    """The numbers in ascending order along an axis, in their own place or in another: these are used up."""
    if has_data_here(numbers):
        numbers.numpy().sort(axis=dim)
        return numbers
    return numbers.sort(dim=dim).values


def least_from(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The least number along the last axis and the first place where it stands."""
    if has_data_here(numbers):
        place = torch.from_numpy(numbers.numpy().argmin(-1))
        return numbers.gather(-1, place[..., None]).squeeze(-1), place
    least = numbers.min(-1)
    return least.values, least.indices


def median_from(numbers: Tensor) -> Tensor:
    """The lower median along the last axis of numbers that are used up."""
    return sorted_from(numbers)[..., (numbers.shape[-1] - 1) // 2]


def has_data_here(numbers: Tensor) -> bool:
    """Whether the host may read the numbers where they are."""
    # A fake tensor has no data.
    return numbers.device.type == "cpu" and type(numbers) is Tensor


def cut(rows: int, at_once: int, device: torch.device) -> Iterator[slice]:
    """Slices that make up `rows`: on a CPU of `at_once` each, at least one, so that what is made of them stays in its
    cache until it is used; on any other device a single one."""
    step = max(1, at_once if device.type == "cpu" else rows)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
