"""`KVCompressionMemory`: exact tokens that are compressed when the next step would exceed the
budget.

Subclasses (`InfiniPotV`, `Hermes`) decide which tokens a compression keeps. `KeptTokensMemory`
serves memories that never compress, too (`reservoir`).

`KeptTokens` has the slots of the budget, `[far | near | free]`: far tokens were chosen by each
layer or head for itself, near tokens are whole steps, the same in all heads. Both are in stream
order. The border between them moves; the shape does not.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import TypeVar

from protokv.core.context import Context
from protokv.core.memory import SingleDeviceMemory
from protokv.core.rotary import Rotary
from protokv.core.settings import MemoryConfig, ShareSetting
from protokv.core.slots import KVSlots
from protokv.core.step import StepKV
from protokv.core.tensors import MemoryShape, Specs, StateTensors, TensorDict, TensorGroups, Tensors
from protokv.errors import StateCorrupt
from protokv.texts import JsonObject


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


ConfigT = TypeVar("ConfigT", bound=MemoryConfig, default=MemoryConfig)
CompressionT = TypeVar("CompressionT", bound=KVCompressionConfig, default=KVCompressionConfig)


class KeptTokensMemory(SingleDeviceMemory[ConfigT]):
    """At most M exact tokens a layer and KV head. A subclass says which tokens stay."""

    def __init__(self, config: ConfigT, shape: MemoryShape, rotary: Rotary) -> None:
        super().__init__(config, shape, rotary)
        # Compact, it matters where the border is. Queries are of one forward.
        alike = config.positions == "stream" and not self.reads_queries
        self.context_key = "slots" if alike else None
        self._slots = KVSlots(shape, far=config.budget, near=0)
        self.kept = KeptTokens(self._slots, shape, attention=self.reads_queries)

    @classmethod
    def declare(cls, config: ConfigT, shape: MemoryShape) -> Specs:
        """Declare M tokens besides."""
        kept = KeptTokens.declare(shape, config.budget, attention=cls.reads_queries)
        return (*super().declare(config, shape), *kept)

    def parts(self) -> Sequence[StateTensors]:
        """Return the kept tokens besides."""
        return (*super().parts(), self.kept)

    @property
    def last_step(self) -> int:
        """The index of the last step seen; -1: none."""
        return self.kept.last_step

    def context(self) -> Context:
        """Return all slots; the far ones hold the tokens that layers or heads chose for
        themselves.
        """
        none = torch.zeros(
            0, self._shape.position_components, dtype=torch.int64, device=self.kept.step.device
        )
        context = self._slots.context(none, lambda: self.kept.positions)
        begin = context.far.start
        return replace(context, far=slice(begin, begin + self.kept.far))

    def report(self) -> JsonObject:
        """Return the number of near and far tokens, and the oldest step that any of them is
        from.
        """
        kept = self.kept
        counts = {"near_tokens_in_use": sum(kept.lengths), "far_tokens_in_use": kept.far}
        oldest = int(kept.step[:, :, 0].min()) if kept.lengths else None
        return counts | {"oldest_step": oldest} | super().report()


class KVCompressionMemory(KeptTokensMemory[CompressionT]):
    """A memory of exact tokens whose compressions keep `compressed_tokens` of the config."""

    @abstractmethod
    def _compress(self, keep: int) -> None:
        """Keep `keep` of the held tokens and free the others."""

    def apply(self, key: None, numbers: Tensor, step: StepKV) -> None:
        """Take one step; compress the held tokens first if the step would exceed the budget."""
        step = step.usable_only()
        T = len(step.positions)
        if not T:
            return
        if self._exceeds(T):
            self._compress(self._room_beside(T))
        self.kept.append(step)

    def _exceeds(self, tokens: int) -> bool:
        """Return True if a step of `tokens` fits only after a compression."""
        M = self._config.budget
        return len(self.kept) + min(tokens, M) > M

    def _room_beside(self, tokens: int) -> int:
        """Return how many tokens a compression keeps so that a step of `tokens` fits."""
        return min(self._config.compressed_tokens, max(0, self._config.budget - tokens))


@dataclass(frozen=True, slots=True)
class HeldTokens:
    """The N held tokens of one layer, oldest first, from which a compression chooses."""

    layer: int  # its index in the model
    keys: Tensor  # `[H, N, D]` float32, rotated to their stream positions
    values: Tensor  # `[H, N, D]` float32
    positions: Tensor  # `[H, N, P]` int64, stream positions
    coordinates: Tensor  # `[H, N, 2]` float32, `(x, y)` of the cell centres in [0, 1]
    steps: Tensor  # `[H, N]` int64, indices of the steps they came in
    # `[Hq, T, D]` float32, rotated, of the step that needs room; None unless the memory sets
    # `reads_queries`
    queries: Tensor | None
    # `[H, N]` float32, the attention that each token got from all steps since it came, summed over
    # queries and query heads; None as above
    attention: Tensor | None


class ScoredMemory(KVCompressionMemory[CompressionT]):
    """A rule of one's own: a compression keeps the newest step whole, and of the older tokens those
    that score best.

    A subclass says `score`; its settings are a `KVCompressionConfig` with a name, whose `memory` is
    the subclass. With `reads_queries = True` the score sees queries and attention, too. Such a
    memory needs a session: `protokv.Cache` refuses it.
    """

    @abstractmethod
    def score(self, held: HeldTokens) -> Tensor:
        """Return how much each token of a layer is worth keeping, `[H, N]` float32; of equal ones
        the newer stays.
        """

    def apply(self, key: None, numbers: Tensor, step: StepKV) -> None:
        """Take one step, as every memory of exact tokens; note first where its queries look."""
        if not self.reads_queries:
            return super().apply(key, numbers, step)
        if step.queries is None:
            raise RuntimeError("this memory reads queries, and the step comes without them")
        step = step.usable_only()
        assert step.queries is not None
        self._queries = step.queries
        attention = self._measure_attention(step, step.queries)
        held = len(self.kept)
        self.kept.attention[:, :, :held] += attention[:, :, :held]
        super().apply(key, numbers, step)
        newest = self.kept.lengths[-1] if self.kept.lengths else 0
        begin = len(self.kept) - newest
        fresh = attention[:, :, attention.shape[2] - newest :]
        self.kept.attention[:, :, begin : len(self.kept)] = fresh
        return None

    def _measure_attention(self, step: StepKV, queries: Tensor) -> Tensor:
        """Return the attention `[L, H, n + T]` float32 that the queries of a step give to held
        tokens and to its own, the prompt prefix included in the softmax.
        """
        kept = self.kept
        L, H, T, D = step.keys.shape
        n = len(kept)
        later = torch.ones(T, T, dtype=torch.bool, device=queries.device).triu(1)
        hidden = functional.pad(later, (self._shape.sink_tokens + n, 0))
        sums = []
        for layer in range(L):
            prefix = self._slots.keys[layer, :, self._slots.sink]
            own = (prefix, kept.keys[layer, :, :n], step.keys[layer])
            keys = torch.cat(own, 1).float()
            folded = queries[layer].float().view(H, -1, T, D)
            logits = folded @ keys.mT[:, None] / D**0.5
            weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
            sums.append(weights.nan_to_num().sum((1, 2))[:, self._shape.sink_tokens :])
        return torch.stack(sums)

    def _compress(self, keep: int) -> None:
        """Keep `keep` tokens: the newest step, and the best of the others in each layer and
        head.
        """
        kept = self.kept
        n = len(kept)
        newest = kept.newest_within(keep)
        chosen = []
        for layer in range(self._shape.layers):
            worth = self.score(self._show(layer, n))
            worth[:, n - sum(newest) :] = torch.inf
            chosen.append(mark_highest_scores(worth, keep).nonzero()[:, 1].view(len(worth), keep))
        kept.keep_(torch.stack(chosen), newest)

    def _show(self, layer: int, n: int) -> HeldTokens:
        """Return the `n` held tokens of a layer."""
        kept = self.kept
        return HeldTokens(
            layer=self._shape.first_layer + layer,
            keys=kept.keys[layer, :, :n].float(),
            values=kept.values[layer, :, :n].float(),
            positions=kept.positions[layer, :, :n],
            coordinates=kept.coordinates[layer, :, :n],
            steps=kept.step[layer, :, :n],
            queries=self._queries[layer].float() if self.reads_queries else None,
            attention=kept.attention[layer, :, :n] if self.reads_queries else None,
        )


def mark_highest_scores(score: Tensor, n: int) -> Tensor:
    """Mark the `n` highest scores of each row of `[H, N]`, `[H, N]` bool; of equal scores the
    later.
    """
    order = score.flip(-1).argsort(dim=-1, descending=True, stable=True)[:, :n]
    return torch.zeros_like(score, dtype=torch.bool).scatter_(1, score.shape[1] - 1 - order, True)


class KeptTokens(StateTensors):
    """M slots for each layer and head: `keys` and `values` are views of the slots; `declare` has
    the others.
    """

    def __init__(self, slots: KVSlots, shape: MemoryShape, *, attention: bool = False) -> None:
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
        # attention that each token got from the queries of steps; empty if nobody sums it
        self.attention = torch.zeros(L, H, M if attention else 0, device=shape.device)
        self.far = 0  # far tokens
        # Tokens of each near step, oldest first. It mirrors `step`, so that no step waits for the
        # device.
        self.lengths: list[int] = []
        self.last_step = -1  # index of the newest step

    def __len__(self) -> int:
        return self.far + sum(self.lengths)

    @property
    def per_token(self) -> tuple[Tensor, ...]:
        """Keys, values, positions, coordinates and steps, and the attention if it is summed."""
        always = self.keys, self.values, self.positions, self.coordinates, self.step
        return (*always, self.attention) if self.attention.numel() else always

    def append(self, step: StepKV) -> None:
        """Copy a step into free slots; of a step larger than M, only the last M tokens."""
        T = min(len(step.positions), self.step.shape[2])
        slots = slice(len(self), len(self) + T)
        new = step.tokens(slice(len(step.positions) - T, None))
        for held, given in zip(
            self.per_token, (new.keys, new.values, new.positions, new.coordinates), strict=False
        ):
            held[:, :, slots] = given
        self.step[:, :, slots] = step.step
        self._bias[:, :, slots] = 0.0
        if T:
            self.lengths.append(T)
        self.last_step = step.step

    def keep_(self, index: Tensor, recent: list[int]) -> None:
        """Keep the tokens `index` `[L, H, n]` int64, increasing, and free all other slots; the last
        of those are near steps of the lengths `recent`.
        """
        _, H, keep = index.shape
        heads = torch.arange(H, device=index.device)[:, None]
        for part in self.per_token:
            for held, kept in zip(part, index, strict=True):
                held[:, :keep] = held[heads, kept]
        self.step[:, :, keep:] = -1
        self.attention[:, :, keep:] = 0.0
        self._bias[:, :, keep:] = -torch.inf
        self.far = keep - sum(recent)
        self.lengths = recent

    def newest_within(self, keep: int) -> list[int]:
        """Return the length of the newest near step, if it has at most `keep` tokens."""
        return [length for length in self.lengths[-1:] if length <= keep]

    @staticmethod
    def declare(shape: MemoryShape, tokens: int, *, attention: bool = False) -> Specs:
        """Declare M slots."""
        declare = shape.axes(kept_token=tokens, xy=2, field=3).declare
        slot = "layer kv_head kept_token"
        i64 = torch.int64
        meaning = "attention that they got from the queries of steps"
        return (
            declare("kept.keys", f"{slot} feature", shape.dtype, "keys of kept tokens, rotated"),
            declare("kept.values", f"{slot} feature", shape.dtype, "values of kept tokens"),
            declare(
                "kept.positions", f"{slot} component", i64, "their stream positions", "position"
            ),
            declare("kept.coordinates", f"{slot} xy", torch.float32, "cells", "share of the image"),
            declare("kept.step", slot, i64, "their steps; -1: a free slot", "step", -1),
            declare("kept.count", "field", i64, "far tokens, near tokens, last step seen"),
            *([declare("kept.attention", slot, torch.float32, meaning)] if attention else []),
        )

    def live_tensors(self) -> TensorDict:
        """Return the saved tensors, live."""
        names = ("keys", "values", "positions", "coordinates", "step", "attention")
        counts = torch.tensor([self.far, sum(self.lengths), self.last_step])
        held = {f"kept.{name}": tensor for name, tensor in zip(names, self.per_token, strict=False)}
        return held | {"kept.count": counts}

    def buffers(self) -> TensorGroups:
        """Return the bias of the slots."""
        return {"kept": (self._bias,)}

    def take(self, tensors: Tensors) -> None:
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
