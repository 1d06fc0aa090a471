"""`Novelty`: which heads see new tokens almost only, and how many of the newest tokens these keep from merging.

Ward's rule keeps what is distinct while distinct tokens fit. Where nothing repeats they never fit: the rule would
average tokens that have nothing in common, and lose the present without winning the past. So each head counts how many
tokens repeat a prototype: merging the two costs less than `REPEATS` times what merging two tokens usually costs.

Where more than `SOME_NEW` of the tokens are new, the newest ones merge with their repeats alone: an eighth of the
stream so far, at least half of the budget, and less of it below `ALL_NEW`. Older ones merge by Ward's rule. There a
merged prototype stands at the mean position of its tokens, which have no other place in common. Where the stream
repeats itself, as video does, none of this happens. `samples/studies/language/` measures what it brings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from protokv.config import DurableConfig
from protokv.core.tensors import LAYER, MemoryShape, TensorSpec
from protokv.errors import StateCorrupt

REPEATS: Final = 0.25
SOME_NEW, ALL_NEW = 0.9, 0.95
_PRESENT: Final = 8
# Counts begin as if so many repeats had been seen: a few steps say little.
AT_FIRST: Final = 16


class Novelty:
    """Counts of B = L * H heads."""

    def __init__(self, config: DurableConfig, shape: MemoryShape) -> None:
        self._config = config
        self._seen, self._repeated = (spec.allocate(shape.device) for spec in self.declare(shape))

    @staticmethod
    def declare(shape: MemoryShape) -> tuple[TensorSpec, ...]:
        """Declare the counts."""
        dims, size = (LAYER, "kv_head"), (shape.layers, shape.kv_heads)
        return (
            TensorSpec(
                "novelty.seen",
                dims,
                size,
                torch.int64,
                "tokens compared with the bank, and 16",
                "tokens",
                fill=AT_FIRST,
            ),
            TensorSpec(
                "novelty.repeated",
                dims,
                size,
                torch.int64,
                "of these, repeats of a prototype, and 16",
                "tokens",
                fill=AT_FIRST,
            ),
        )

    def count_(self, seen: int | Tensor, repeated: Tensor, heads: slice = slice(None)) -> None:
        """Count tokens of n heads that were compared with the bank, and `[n]` that repeat a prototype."""
        self._seen.view(-1)[heads] += seen
        self._repeated.view(-1)[heads] += repeated

    def share(self, heads: slice = slice(None)) -> Tensor:
        """Return which part of the present is kept from merging, `[n]` float32: 0 where the stream repeats itself."""
        seen, repeated = (counts.view(-1)[heads] for counts in (self._seen, self._repeated))
        return ((seen * (1 - SOME_NEW) - repeated) / (seen * (ALL_NEW - SOME_NEW))).clamp_(0, 1)

    def present(self, step: int, tokens: int, most: int) -> float:
        """Return how many of the newest tokens in the bank are the present, up to `most`; a step has `tokens`."""
        config = self._config
        present = max(config.budget / 2, (step + 1) * tokens / _PRESENT) - config.near_tokens
        return max(0.0, min(present, most))

    def held(self) -> dict[str, Tensor]:
        """Return the counts."""
        return {"novelty.seen": self._seen, "novelty.repeated": self._repeated}

    @staticmethod
    def check(tensors: Mapping[str, Tensor]) -> None:
        """Refuse counts that no stream leaves."""
        seen, repeated = tensors["novelty.seen"], tensors["novelty.repeated"]
        if ((repeated < AT_FIRST) | (repeated > seen)).any():
            raise StateCorrupt(f"state: tensor novelty.repeated must be from {AT_FIRST} to novelty.seen")

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the counts of a checked state."""
        for held, counts in self.held().items():
            counts.copy_(tensors[held])
