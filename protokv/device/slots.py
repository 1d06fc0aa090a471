"""How slots lie on a device, so that attention reads them in place.

In half precision CUDA's kernels read the bias of a slot from columns behind its key (`kernels`).
There rows stand behind the slots, too, for a question and its answer (`answers`): a token attends
to both at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from protokv.device import kernels
from protokv.device.arrays import KeysValues, write_rows_
from protokv.device.runs import catch_up

ANSWER_ROWS = 256
"""Rows behind those of the slots."""


class SlotRows:
    """Keys and values `[L, H, N, D]` of slots, and their bias `[L, H, N]` float32: 0 and `-inf` at
    first.
    """

    def __init__(
        self, size: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        L, H, N, D = size
        self._device = device
        wide = kernels.uses_bias_columns(D, dtype, device)
        rows = N + ANSWER_ROWS * wide
        columns = kernels.BIAS_COLUMNS * wide
        keys = torch.zeros(L, H, rows, D + columns, dtype=dtype, device=device)
        # Attention reads as many columns of values, and what it sums of these is left out. So they
        # are the beginning of the next row; some numbers stand behind the last one.
        self._numbers = torch.zeros(L * H * rows * D + columns, dtype=dtype, device=device)
        values = self._numbers[: L * H * rows * D].view(L, H, rows, D)
        self.keys = keys[:, :, :N, :D]
        self.values = values[:, :, :N]
        self.bias = torch.full((L, H, N), -torch.inf, device=device)
        # with columns and the rows behind
        self._wide = (keys, self._numbers.as_strided(keys.shape, values.stride())) if wide else None
        # those of all heads together, and how many each of them has there
        self._flat = (keys.flatten(0, 2)[:, :D], values.flatten(0, 2))
        self._of_head = rows

    def rows_from(self, first: int) -> KeysValues:
        """Return keys and values of all heads together, from slot `first` of the first head on,
        `[n, D]`.
        """
        keys, values = self._flat
        return keys[first:], values[first:]

    def find_rows(self, slots: Tensor, of_head: int) -> Tensor:
        """Return the rows of `rows_from` that hold `slots` `[n]` int64, which count over all heads,
        `of_head` in each.
        """
        head = slots.div(of_head, rounding_mode="floor")
        return torch.add(slots, head, alpha=self._of_head - of_head)

    def write_rows(self, first: int, rows: Tensor, given: Sequence[Tensor]) -> None:
        """Write keys, and values if they are given, into `rows` `[n]` of `rows_from`."""
        for held, new in zip(self.rows_from(first), given, strict=False):
            write_rows_(held, rows, new.to(held.dtype))

    def read(self) -> KeysValues | None:
        """Return wide keys and values, with the bias as it is now; None: attention reads them as
        they are. What is launched from here on comes after all that was written.
        """
        catch_up(self._device)
        if self._wide is not None:
            D = self.keys.shape[-1]
            columns = kernels.make_bias_columns(self.bias, D**-0.5, self.keys.dtype)
            self._wide[0][:, :, : columns.shape[2], D : D + columns.shape[-1]] = columns
        return self._wide

    def beside(self) -> list[Tensor]:
        """Return what is held beside keys, values and bias."""
        if self._wide is None:
            return []
        N, D = self.keys.shape[2:]
        keys, values = self._wide
        behind = self._numbers[-kernels.BIAS_COLUMNS :]
        return [keys[:, :, :N, D:], keys[:, :, N:], values[:, :, N:, :D], behind]


def widen(keys: Tensor, values: Tensor, bias: Tensor) -> KeysValues:
    """Return keys and values `[..., N, D]` as attention reads them with this bias `[..., N]`, in
    copies where that is another way.
    """
    D = keys.shape[-1]
    if not kernels.uses_bias_columns(D, keys.dtype, keys.device):
        return keys, values
    columns = kernels.make_bias_columns(bias, D**-0.5, keys.dtype)
    return kernels.append_bias_columns(keys, values, columns)
