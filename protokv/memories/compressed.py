"""`KVCompressionMemory`: exact tokens that are compressed when the next step would exceed the
budget.

Subclasses (`InfiniPotV`, `Hermes`) decide which tokens a compression keeps. `KeptTokensMemory`
serves memories that never compress, too (`reservoir`).

`_KeptTokens` has the slots of the budget, `[far | near | free]`: far tokens were chosen by each
layer or head for itself, near tokens are whole steps, the same in all heads. Both are in stream
order. The border between them moves; the shape does not.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from protokv.core.context import Context
from protokv.core.memory import SingleDeviceMemory
from protokv.core.near import KVSlots
from protokv.core.rotary import Rotary
from protokv.core.settings import MemoryConfig, ShareSetting
from protokv.core.step import StepKV
from protokv.core.tensors import LAYER, MemoryShape, StateTensors, TensorSpec
from protokv.errors import StateCorrupt


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCompressionConfig(MemoryConfig):
    """Exact tokens, compressed whenever the next step would exceed the budget.

    Attributes:
        kept_share: fraction of the budget that a compression keeps; the rest is room for new steps.
    """

    kept_share: ShareSetting = 0.75

    @property
    def compressed_tokens(self) -> int:
        """|C|, tokens that a compression keeps in each layer and KV head; fewer if a step needs
        more room.
        """
        return int(Fraction(repr(self.kept_share)) * self.budget)


class KeptTokensMemory(SingleDeviceMemory):
    """At most M exact tokens a layer and KV head. A subclass says which tokens stay."""

    def __init__(self, config: Any, shape: MemoryShape, rotary: Rotary) -> None:
        super().__init__(config, shape, rotary)
        self.steady = config.positions == "stream"  # compact, it matters where the border is
        self._slots = KVSlots(shape, far=config.budget, near=0)
        self._kept = _KeptTokens(self._slots, shape)

    @classmethod
    def declare(cls, config: Any, shape: MemoryShape) -> tuple[TensorSpec, ...]:
        """Declare M tokens besides."""
        return (*super().declare(config, shape), *_KeptTokens.declare(shape, config.budget))

    def parts(self) -> Sequence[StateTensors]:
        """Return the kept tokens besides."""
        return (*super().parts(), self._kept)

    def context(self) -> Context:
        """Return all slots; the far ones hold the tokens that layers or heads chose for
        themselves.
        """
        none = torch.zeros(
            0, self._shape.position_components, dtype=torch.int64, device=self._kept.step.device
        )
        context = self._slots.context(none, lambda: self._kept.positions)
        begin = context.far.start
        return replace(context, far=slice(begin, begin + self._kept.far))

    def report(self) -> dict[str, Any]:
        """Return the number of near and far tokens, and the oldest step that any of them is
        from.
        """
        kept = self._kept
        counts = {"near_tokens_in_use": sum(kept.lengths), "far_tokens_in_use": kept.far}
        oldest = int(kept.step[:, :, 0].min()) if kept.lengths else None
        return counts | {"oldest_step": oldest} | super().report()


class KVCompressionMemory(KeptTokensMemory):
    """A memory of exact tokens whose compressions keep `compressed_tokens` of the config."""

    @abstractmethod
    def _compress(self, keep: int) -> None:
        """Keep `keep` of the held tokens and free the others."""

    def append(self, step: StepKV) -> None:
        """Take one step; compress the held tokens first if the step would exceed the budget."""
        step = self._admit(step, self._kept.last_step).usable_only()
        T = len(step.positions)
        if not T:
            return
        if self._exceeds(T):
            self._compress(self._room_beside(T))
        self._kept.append(step)

    def _exceeds(self, tokens: int) -> bool:
        """Return True if a step of `tokens` fits only after a compression."""
        M: int = self._config.budget
        return len(self._kept) + min(tokens, M) > M

    def _room_beside(self, tokens: int) -> int:
        """Return how many tokens a compression keeps so that a step of `tokens` fits."""
        keep: int = min(self._config.compressed_tokens, max(0, self._config.budget - tokens))
        return keep


class ScoredMemory(KVCompressionMemory):
    """A rule of one's own: a compression keeps the newest step whole, and of the older tokens those
    that score best.

    A subclass says `score`; its settings are a `KVCompressionConfig` with a name, whose `memory` is
    the subclass.
    """

    @abstractmethod
    def score(self, keys: Tensor, values: Tensor) -> Tensor:
        """Return how much each token is worth keeping, `[H, N]` float32; of equal ones the newer
        stays.

        `keys` and `values` `[H, N, D]` float32 are of all tokens of a layer, oldest first; keys are
        rotated.
        """

    def _compress(self, keep: int) -> None:
        """Keep `keep` tokens: the newest step, and the best of the others in each layer and
        head.
        """
        kept = self._kept
        held = len(kept)
        newest = kept.newest_within(keep)
        heads = torch.arange(self._shape.kv_heads, device=kept.step.device)[:, None]
        for parts in zip(*kept.parts, strict=True):
            worth = self.score(*(part[:, :held].float() for part in parts[:2]))
            worth[:, held - sum(newest) :] = torch.inf
            index = mark_highest_scores(worth, keep).nonzero()[:, 1].view(-1, keep)
            for part in parts:
                part[:, :keep] = part[heads, index]
        kept.truncate(keep, newest)


def mark_highest_scores(score: Tensor, n: int) -> Tensor:
    """Mark the `n` highest scores of each row of `[H, N]`, `[H, N]` bool; of equal scores the
    later.
    """
    order = score.flip(-1).argsort(dim=-1, descending=True, stable=True)[:, :n]
    return torch.zeros_like(score, dtype=torch.bool).scatter_(1, score.shape[1] - 1 - order, True)


class _KeptTokens(StateTensors):
    """M slots for each layer and head: `keys` and `values` are views of the slots; `declare` has
    the others.
    """

    def __init__(self, slots: KVSlots, shape: MemoryShape) -> None:
        held = slots.far
        self.keys = slots.keys[:, :, held]
        self.values = slots.values[:, :, held]
        self._bias = slots.bias[:, :, held]
        L, H, M = self._bias.shape
        self.positions = torch.zeros(
            L, H, M, shape.position_components, dtype=torch.int64, device=shape.device
        )
        self.coordinates = torch.zeros(L, H, M, 2, device=shape.device)
        self.step = torch.full((L, H, M), -1, device=shape.device)
        self.far = 0  # far tokens
        # Tokens of each near step, oldest first. It mirrors `step`, so that no step waits for the
        # device.
        self.lengths: list[int] = []
        self.last_step = -1  # index of the newest step

    def __len__(self) -> int:
        return self.far + sum(self.lengths)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Keys, values, positions, coordinates and steps."""
        return self.keys, self.values, self.positions, self.coordinates, self.step

    def append(self, step: StepKV) -> None:
        """Copy a step into free slots; of a step larger than M, only the last M tokens."""
        T = min(len(step.positions), self.step.shape[2])
        slots = slice(len(self), len(self) + T)
        new = step.tokens(slice(len(step.positions) - T, None))
        for held, given in zip(
            self.parts, (new.keys, new.values, new.positions, new.coordinates), strict=False
        ):
            held[:, :, slots] = given
        self.step[:, :, slots] = step.step
        self._bias[:, :, slots] = 0.0
        if T:
            self.lengths.append(T)
        self.last_step = step.step

    def keep_(self, index: Tensor) -> None:
        """Keep the tokens `index` `[n]` int64, increasing, in all layers and heads alike."""
        for part in self.parts:
            part[:, :, : len(index)] = part[:, :, index]
        self.truncate(len(index), [])

    def newest_within(self, keep: int) -> list[int]:
        """Return the length of the newest near step, if it has at most `keep` tokens."""
        return [length for length in self.lengths[-1:] if length <= keep]

    def truncate(self, keep: int, recent: list[int]) -> None:
        """Free all slots after the first `keep`; the last of those are near steps of the lengths
        `recent`.
        """
        self.step[:, :, keep:] = -1
        self._bias[:, :, keep:] = -torch.inf
        self.far = keep - sum(recent)
        self.lengths = recent

    @staticmethod
    def declare(shape: MemoryShape, tokens: int) -> tuple[TensorSpec, ...]:
        """Declare M slots."""
        L = shape.layers
        H = shape.kv_heads
        M = tokens
        D = shape.head_size
        P = shape.position_components
        slot = (LAYER, "kv_head", "kept_token")
        slots = (L, H, M)
        i64 = torch.int64
        return (
            TensorSpec(
                "kept.keys",
                (*slot, "feature"),
                (*slots, D),
                shape.dtype,
                "keys of kept tokens, rotated",
            ),
            TensorSpec(
                "kept.values", (*slot, "feature"), (*slots, D), shape.dtype, "values of kept tokens"
            ),
            TensorSpec(
                "kept.positions",
                (*slot, "component"),
                (*slots, P),
                i64,
                "their stream positions",
                "position",
            ),
            TensorSpec(
                "kept.coordinates",
                (*slot, "xy"),
                (*slots, 2),
                torch.float32,
                "cells",
                "share of the image",
            ),
            TensorSpec(
                "kept.step", slot, slots, i64, "their steps; -1: a free slot", "step", fill=-1
            ),
            TensorSpec(
                "kept.count", ("field",), (3,), i64, "far tokens, near tokens, last step seen"
            ),
        )

    def live_tensors(self) -> dict[str, Tensor]:
        """Return the saved tensors, live."""
        names = ("kept.keys", "kept.values", "kept.positions", "kept.coordinates", "kept.step")
        counts = torch.tensor([self.far, sum(self.lengths), self.last_step])
        return dict(zip(names, self.parts, strict=True)) | {"kept.count": counts}

    def buffers(self) -> Mapping[str, Sequence[Tensor]]:
        """Return the bias of the slots."""
        return {"kept": (self._bias,)}

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the tokens of a state."""
        self.far, near, self.last_step = tensors["kept.count"].tolist()
        M = self.step.shape[2]
        if min(self.far, near) < 0 or self.far + near > M:
            raise StateCorrupt(
                f"state: tensor kept.count holds {self.far} and {near} for {M} slots"
            )
        for name, held in self.live_tensors().items():
            if name != "kept.count":
                held.copy_(tensors[name])
        self._bias.fill_(0.0).masked_fill_(self.step < 0, -torch.inf)
        whole = self.step[0, 0, self.far : self.far + near]
        self.lengths = torch.unique_consecutive(whole, return_counts=True)[1].tolist()
