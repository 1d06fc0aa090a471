"""Operations on rows of tensors, the least along an axis, and cache-sized chunks, each as suits the device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_WIDE = torch.complex128


def write_rows_(held: Tensor, rows: Tensor, new: Tensor) -> None:
    """Write `new` `[n, F]` or `[n]` into rows `[n]` of `held` `[N, F]` or `[N]`.

    Rows are written as wide elements where they fit: a CPU moves one element after another.
    """
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


def least_from(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the least number along the last axis and its first index."""
    # numpy reads them in place, and several times as fast; a fake tensor has no data.
    if numbers.device.type == "cpu" and type(numbers) is Tensor:
        place = torch.from_numpy(numbers.numpy().argmin(-1))
        return numbers.gather(-1, place[..., None]).squeeze(-1), place
    least = numbers.min(-1)
    return least.values, least.indices


def chunks(rows: int, at_once: int, device: torch.device) -> Iterator[slice]:
    """Split work into cache-sized chunks on a CPU, one chunk elsewhere; results do not depend on the size."""
    step = max(1, at_once if device.type == "cpu" else rows)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
