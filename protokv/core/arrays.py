"""Operations on rows of tensors, the least along an axis, and cache-sized chunks, each as suits the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_WIDE = torch.complex128


def concat_rows(parts: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Return parts joined along an axis; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), axis)


def write_rows_(held: Tensor, rows: Tensor, new: Tensor) -> None:
    """Write `new` `[n, F]` or `[n]` into rows `[n]` of `held` `[N, F]` or `[N]`."""
    # A CPU moves one element after another, so they are wide where they fit.
    if held.ndim == 2 and held.shape[1] * held.itemsize % _WIDE.itemsize == 0:
        # The strides of a single row are arbitrary and may forbid the wide view; a flat view has stride 1.
        held = held.view(_WIDE)
        new = new.reshape(-1).view(_WIDE).view(-1, held.shape[1])
    held.index_copy_(0, rows, new)


def add_rows_(held: Tensor, rows: Tensor, new: Tensor) -> None:
    """Add `new` `[n, F]` to rows `[n]` of `held` `[N, F]`, rows that occur twice in a fixed order."""
    if held.device.type == "cpu":
        held.index_add_(0, rows, new)  # one after the other
    else:
        held.index_put_((rows,), new, accumulate=True)


def find_first_minimum(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the least number along the last axis and its first index."""
    if is_readable_by_numpy(numbers):
        place = torch.from_numpy(numbers.numpy().argmin(-1))
        return numbers.gather(-1, place[..., None]).squeeze(-1), place
    least = numbers.min(-1)
    return least.values, least.indices


def sum_weighted_rows(rows: Tensor, share: Tensor, into: Tensor, stay: Tensor) -> Tensor:
    """Return of rows `[B, n, F]`, each times its `share` `[B, n]`, the sums of those that go `into` each of `stay`
    `[B, C]`."""
    B, n, F = rows.shape
    if is_readable_by_numpy(rows):
        # One row after the other. A device would add in any order, and has the product at once.
        first = torch.arange(0, B * n, n)[:, None]
        sums = torch.zeros(B * n, F).index_add_(0, (into + first).flatten(), (rows * share[:, :, None]).flatten(0, 1))
        return sums.index_select(0, (stay + first).flatten()).view(B, -1, F)
    return torch.bmm((into[:, None] == stay[:, :, None]) * share[:, None], rows)


def is_readable_by_numpy(numbers: Tensor) -> bool:
    """Return whether numpy reads numbers in place, several times as fast as torch; a fake tensor has no data."""
    return numbers.device.type == "cpu" and type(numbers) is Tensor


def slice_rows(rows: int, at_once: int) -> Iterator[slice]:
    """Yield parts of some rows, of at most `at_once` rows, and of one at least."""
    step = max(1, at_once)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
