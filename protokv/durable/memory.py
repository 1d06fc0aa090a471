"""`Durable`: the agglomerative memory, the default. Near window and a bank under a merging rule (`protokv.durable`).

Chooses the rule by the size of the bank, and shows a bank of 8-bit centres decoded where it is read. In a stream with
words these are held apart (`durable.words`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from protokv.config import DurableConfig
from protokv.core.bank import Policy, PrototypeBank
from protokv.core.context import Context, SlotContext
from protokv.core.near import Slots
from protokv.core.prototypes import Layout, ProtoKV
from protokv.core.rotary import Rotary
from protokv.core.sanitize import Sanitizer
from protokv.core.step import StepKV
from protokv.core.tensors import MemoryShape, StatePart, TensorSpec
from protokv.durable.agglomerative import Agglomerative
from protokv.durable.blocked import BlockedRule
from protokv.durable.quantized import QuantizedBank
from protokv.durable.words import WordSlots, WordsRegion
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
        self._words: WordsRegion | None = None
        if isinstance(self._slots, WordSlots):
            sanitizer = Sanitizer(shape, refuse=config.non_finite == "refuse")
            self._words = WordsRegion(self._slots, sanitizer, config.words_keep)

    @classmethod
    def new_slots(cls, config: Any, shape: MemoryShape) -> Slots:
        """Return the slots, with some for words if the stream has any."""
        if not config.words_tokens:
            return super().new_slots(config, shape)
        return WordSlots(shape, far=cls.far_slots(config), near=config.near_tokens, words=config.words_tokens)

    @classmethod
    def declare(cls, config: Any, shape: MemoryShape) -> tuple[TensorSpec, ...]:
        """Declare the paper's parts, and the words."""
        words = WordsRegion.declare(shape, config.words_tokens) if config.words_tokens else ()
        return (*super().declare(config, shape), *words)

    def parts(self) -> Sequence[StatePart]:
        """Return the holders of these."""
        return super().parts() if self._words is None else (*super().parts(), self._words)

    def append(self, step: StepKV) -> None:
        """Take one step, its words apart."""
        if self._words is None or not step.words:
            super().append(step)
            return
        pictures = len(step.positions) - step.words
        super().append(step.tokens(slice(0, pictures)))
        self._words.append(step.tokens(slice(pictures, None)))

    def report(self) -> dict[str, Any]:
        """Return the paper's numbers, and the tokens of words that are held."""
        found = super().report()
        if self._words is not None:
            found["tokens_dropped"] += self._words.dropped
            found["words_tokens_in_use"] = len(self._words)
        return found

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
        exact, K = slots.context(self._near.positions), bank.mass.shape[2]
        far = slice(exact.far.start, exact.far.stop + K)
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
        return DecodedContext(slots.keys, slots.values, bias, far, positions, decoded=K, decode=decode)


def _insert(held: Tensor, at: int, more: Tensor) -> Tensor:
    """Return `held` `[L, H, N, ...]` with `more` inserted at slot `at`."""
    return torch.cat((held[:, :, :at], more, held[:, :, at:]), 2)
