"""`Novelty`: how much of a stream is new to the bank, and how many of the newest tokens that keeps from merging.

Ward's rule keeps what is distinct while distinct tokens fit. Where nothing repeats they never fit: the rule would
average tokens that have nothing in common, and so lose the present and win nothing for the past. So each head counts
how many tokens repeat what its bank holds. Where nearly all are new, the newest tokens merge with their repeats alone:
an eighth of the stream so far, and at least half of the budget. What is older merges by Ward's rule, and a prototype
stands at the mean position of its tokens. Where the stream repeats itself, as video does, nothing is different.

A token repeats a prototype if merging the two costs less than `REPEATS` times what merging two tokens of one step
usually costs. `samples/studies/language/` has the measurements that the constants follow from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from protokv.config import DurableConfig
from protokv.core.bank import PrototypeBank
from protokv.core.tensors import LAYER, MemoryShape, TensorSpec
from protokv.errors import StateCorrupt

REPEATS: Final = 0.1
SOME_NEW, ALL_NEW = 0.75, 0.9
"""Shares of new tokens from which on some, and all, of the newest tokens are kept from merging."""
_PRESENT: Final = 8


class Novelty:
    """Counts of the heads of one bank, `[B]` with B = L * H."""

    def __init__(self, bank: PrototypeBank, config: DurableConfig) -> None:
        self._bank, self._config = bank, config
        self._heads = bank.mass.shape[:2]
        self._seen, self._repeated = bank.mass.new_zeros(2, self._heads.numel())

    @staticmethod
    def declare(shape: MemoryShape) -> tuple[TensorSpec, ...]:
        """Declare the counts."""
        dims, size = (LAYER, "kv_head"), (shape.layers, shape.kv_heads)
        return (
            TensorSpec("novelty.seen", dims, size, torch.int64, "tokens compared with the bank", "tokens"),
            TensorSpec("novelty.repeated", dims, size, torch.int64, "of these, repeats of a prototype", "tokens"),
        )

    def count_(self, cost: Tensor, usual: Tensor, heads: slice = slice(None)) -> None:
        """Count tokens of some heads.

        Args:
            cost: `[n, T]` float32, of merging each token with the prototype nearest to it.
            usual: `[n]` float32, of merging two tokens of one step.
            heads: the n heads.
        """
        self._seen[heads] += cost.shape[1]
        self._repeated[heads] += (cost < REPEATS * usual[:, None]).sum(1)

    def protected(self, most: int, heads: slice = slice(None)) -> Tensor:
        """Return how many of the newest tokens in the bank merge only with their repeats, `[n]` int64, up to `most`."""
        config, bank = self._config, self._bank
        seen = self._seen[heads]
        new = 1 - self._repeated[heads] / seen.clamp(min=1)
        share = ((new - SOME_NEW) / (ALL_NEW - SOME_NEW)).clamp_(0, 1).masked_fill_(seen == 0, 0)
        entered = (bank.opened + bank.absorbed).view(-1)[heads]
        present = ((entered + config.near_tokens) / _PRESENT).clamp_(min=config.budget / 2) - config.near_tokens
        return present.clamp_(0, max(most, 0)).mul_(share).long()

    def held(self) -> dict[str, Tensor]:
        """Return the counts."""
        counts = {"novelty.seen": self._seen, "novelty.repeated": self._repeated}
        return {name: count.view(self._heads) for name, count in counts.items()}

    @staticmethod
    def check(tensors: Mapping[str, Tensor]) -> None:
        """Refuse counts that no stream leaves."""
        seen, repeated = tensors["novelty.seen"], tensors["novelty.repeated"]
        if (repeated < 0).any() or (repeated > seen).any():
            raise StateCorrupt("state: tensor novelty.repeated must be from 0 to novelty.seen")
        if (seen > tensors["bank.opened"] + tensors["bank.absorbed"]).any():
            raise StateCorrupt("state: tensor novelty.seen must not count more tokens than entered the bank")

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the counts of a checked state."""
        self._seen.copy_(tensors["novelty.seen"].flatten())
        self._repeated.copy_(tensors["novelty.repeated"].flatten())
