"""`Durable`: the agglomerative memory, the default. Near window and a bank under a merging rule (`protokv.durable`).

Chooses the rule by the size of the bank, and shows a bank of 8-bit centres decoded where it is read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from protokv.config import DurableConfig
from protokv.core.bank import Policy, PrototypeBank
from protokv.core.context import Context, SlotContext
from protokv.core.prototypes import Layout, ProtoKV
from protokv.core.rotary import Rotary
from protokv.core.tensors import MemoryShape
from protokv.durable.agglomerative import Agglomerative
from protokv.durable.blocked import BlockedRule
from protokv.durable.quantized import QuantizedBank
from protokv.extras.decoded import DecodedContext

# Numbers of quantized keys, or values, of all layers that are decoded together: 16 MB of each in bfloat16.
_DECODED_AT_ONCE = 2**23


class Durable(ProtoKV):
    """W exact tokens, and K prototypes a layer and KV head that keep what is distinct and merge what is redundant."""

    def __init__(self, config: DurableConfig, shape: MemoryShape, rotary: Rotary) -> None:
        super().__init__(config, shape, rotary)
        if config.is_quantized:
            # Its prototypes have no slots of their own.
            self._layout = Layout(self._slots, 0, 1)

    @staticmethod
    def bank_type(config: Any) -> type[PrototypeBank]:
        """Return the class of the bank under these settings."""
        return QuantizedBank if config.is_quantized else PrototypeBank

    @staticmethod
    def rule_type(config: Any) -> type[Policy]:
        """Return the rule by which tokens enter the bank."""
        return BlockedRule if config.is_blocked else Agglomerative

    @staticmethod
    def far_slots(config: Any) -> int:
        """Return how many slots hold pseudo-tokens; quantized prototypes are decoded where they are read."""
        return 0 if config.is_quantized else ProtoKV.far_slots(config)

    def context(self) -> Context:
        """Return all slots; quantized prototypes are decoded at once where they are few, else when a layer is read."""
        bank, slots = self._bank, self._slots
        if not isinstance(bank, QuantizedBank):
            return super().context()
        far = slice(slots.sink.stop, slots.sink.stop + bank.mass.shape[2])
        exact = slots.context(self._near.positions)
        bias = _insert(slots.bias, far.start, self._bias_of(bank.mass, torch.ones_like(bank.mass)))

        def positions() -> Tensor:
            assert exact.positions is not None
            return _insert(exact.positions(), far.start, bank.position.round().long())

        def decode(layer: int | slice, heads: slice) -> tuple[Tensor, Tensor]:
            return bank.show(layer, heads, self._rotary, slots.keys.dtype)

        if bank.mass.numel() * self._shape.head_size <= _DECODED_AT_ONCE:
            pairs = zip((slots.keys, slots.values), decode(slice(None), slice(None)), strict=True)
            keys, values = (_insert(held, far.start, shown) for held, shown in pairs)
            return SlotContext(keys, values, bias, far, positions)
        return DecodedContext(slots.keys, slots.values, bias, far, positions, decode=decode)


def _insert(held: Tensor, at: int, more: Tensor) -> Tensor:
    """Return `held` `[L, H, N, ...]` with `more` inserted at slot `at`."""
    return torch.cat((held[:, :, :at], more, held[:, :, at:]), 2)
