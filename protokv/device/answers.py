"""`AnswerBuffer`: the tokens of a question and its answer in buffers of one size, so that
forwarding them is the same operations, wherever they stand.
"""

from __future__ import annotations

import torch
from torch import Tensor

from protokv.device import kernels
from protokv.device.arrays import KeysValues
from protokv.device.slots import ANSWER_ROWS


class AnswerBuffer:
    """Keys and values of so many tokens in each layer; they grow from the front."""

    slots: Tensor  # places of the tokens being forwarded, `[T]` int64
    mask: Tensor  # which places each of them sees, `[T, capacity]` bool

    def __init__(self, tokens: int, device: torch.device, wide: KeysValues | None = None) -> None:
        """Make room for `tokens` or more, behind the slots of `SlotRows.read` if they are given and
        have it.
        """
        self.capacity = max(ANSWER_ROWS, 1 << (tokens - 1).bit_length())
        self._wide = wide if tokens <= ANSWER_ROWS else None
        # The position of the first token, and how many there are before those being forwarded.
        self.first, self.begin = torch.zeros(2, 1, dtype=torch.int64, device=device)
        self._line = torch.arange(self.capacity, device=device)
        self._held: dict[int, list[Tensor]] = {}  # keys and values of each layer

    def enter(self, tokens: int) -> None:
        """Say how many tokens are forwarded next. What they see is read from the device."""
        self.slots = self.begin + self._line[:tokens]
        self.mask = self._line <= self.slots[:, None]
        if self._wide is not None:
            hidden = self._line > self.slots[-1]
            kernels.hide_rows_(self._wide[0][:, :, -ANSWER_ROWS:], hidden)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> KeysValues:
        """Write keys and values `[..., H, T, D]` of the tokens being forwarded in a layer; return
        all, `[..., H, capacity, D]`.
        """
        if layer not in self._held:
            size = (*keys.shape[:-2], self.capacity, keys.shape[-1])
            self._held[layer] = (
                [one.new_zeros(size) for one in (keys, values)]
                if self._wide is None
                else [one[layer, ..., -ANSWER_ROWS:, : size[-1]].expand(size) for one in self._wide]
            )
        held, beside = self._held[layer]
        held.index_copy_(-2, self.slots, keys)
        beside.index_copy_(-2, self.slots, values)
        return held, beside

    def sees_slots(self, query: Tensor, scaling: float) -> bool:
        """Return whether `attend` serves a query `[Hq, T, D]`. Columns of a bias are made for the
        usual scaling.
        """
        _, T, D = query.shape
        return self._wide is not None and T == 1 and scaling == D**-0.5

    def attend(self, layer: int, query: Tensor, scaling: float) -> Tensor:
        """Attend with one token `[Hq, 1, D]` to the slots of a layer and to all tokens so far."""
        assert self._wide is not None
        keys, values = (one[layer] for one in self._wide)
        stacked, wide = kernels.stack_queries(query, keys.shape[0])
        assert wide is not None
        out, _ = kernels.attend_wide(wide, keys, values, stacked.shape[-1], scaling)
        return out.reshape(query.shape)
