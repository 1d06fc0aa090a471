"""Operations on rows of tensors, the least along an axis, and cache-sized chunks, each as suits the
device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

KeysValues = tuple[Tensor, Tensor]
"""Keys and values of the same tokens."""

_WIDE = torch.complex128


def make_host_buffer(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an empty tensor on the host, from which a device copies while the host goes on."""
    return torch.empty(size, dtype=dtype, pin_memory=device.type == "cuda")


def concat_rows(parts: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Return parts joined along an axis; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), axis)


def write_rows_(held: Tensor, rows: Tensor, new: Tensor) -> None:
    """Write `new` `[n, F]` or `[n]` into rows `[n]` of `held` `[N, F]` or `[N]`."""
    # A CPU moves one element after another, so they are wide where they fit.
    if held.ndim == 2 and held.shape[1] * held.itemsize % _WIDE.itemsize == 0:
        # The strides of a single row are arbitrary and may forbid the wide view; a flat view has
        # stride 1.
        held = held.view(_WIDE)
        new = new.reshape(-1).view(_WIDE).view(-1, held.shape[1])
    held.index_copy_(0, rows, new)


def add_rows_(held: Tensor, rows: Tensor, new: Tensor) -> None:
    """Add `new` `[n, F]` to rows `[n]` of `held` `[N, F]`, rows that occur twice in a fixed
    order.
    """
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


def find_greatest(numbers: Tensor) -> Tensor:
    """Return the greatest absolute number along the last axis."""
    if is_readable_by_numpy(numbers):
        return numbers.abs().amax(-1)
    greatest: Tensor = torch.linalg.vector_norm(numbers, torch.inf, -1)
    return greatest


def multiply_codes(codes: Tensor, factors: Tensor) -> Tensor:
    """Return codes, int8 or float32 that may change, times float32 `factors`."""
    if is_readable_by_numpy(codes):
        # A CPU multiplies numbers of two dtypes thirty times as slowly.
        return codes.float().mul_(factors)
    return codes * factors


def sum_weighted_rows(
    each: Sequence[Tensor], share: Tensor, into: Tensor, stay: Tensor
) -> list[Tensor]:
    """Return of each tensor `[B, n, F]` the sums of its rows, times their `share` `[B, n]`, that go
    `into` each of `stay` `[B, C]`."""
    if is_readable_by_numpy(share):
        # One row after the other. A device would add in any order, and has the products at once.
        rows = torch.cat(list(each), 2)
        first = torch.arange(0, share.numel(), share.shape[1])[:, None]
        (B, n, F), goal = rows.shape, (into + first).flatten()
        sums = torch.zeros(B * n, F).index_add_(0, goal, (rows * share[:, :, None]).flatten(0, 1))
        chosen = sums.index_select(0, (stay + first).flatten()).view(B, -1, F)
        return list(torch.split(chosen, [one.shape[2] for one in each], 2))
    weights = (into[:, None] == stay[:, :, None]) * share[:, None]
    return [torch.bmm(weights, rows) for rows in each]


def is_readable_by_numpy(numbers: Tensor) -> bool:
    """Return whether numpy reads numbers in place, several times as fast as torch; a fake tensor
    has no data.
    """
    return numbers.device.type == "cpu" and type(numbers) is Tensor


def slice_rows(rows: int, at_once: int) -> Iterator[slice]:
    """Yield parts of some rows, of at most `at_once` rows, and of one at least."""
    step = max(1, at_once)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
