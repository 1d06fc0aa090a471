"""`CompressedMemory`: what the memories share that compress exact tokens when the next step would exceed the budget.

Such a memory is the prompt prefix and its kept tokens. Owns when room is made and for how much, and how kept tokens are
shown and counted; which of them a compression keeps is for the memory that derives from it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from protokv.context import Context
from protokv.memory.base import MemoryShape, StepKV
from protokv.memory.intake import Intake
from protokv.memory.kept import KeptTokens
from protokv.memory.local import LocalMemory
from protokv.memory.slots import Slots
from protokv.memory.state import StatePart, TensorSpec
from protokv.rotary import Rotary


class CompressedMemory(LocalMemory):
    """At most M tokens a layer and KV head; a compression keeps `compressed_tokens` of the config."""

    def __init__(self, config: Any, shape: MemoryShape, rotary: Rotary) -> None:
        super().__init__(config, shape, rotary)
        self._slots = Slots(shape, far=config.budget, near=0)
        self._kept = KeptTokens(self._slots, shape)

    @classmethod
    def declare(cls, config: Any, shape: MemoryShape) -> tuple[TensorSpec, ...]:
        """The prompt prefix and M tokens."""
        return (*Slots.declare(shape), *Intake.declare(), *KeptTokens.declare(shape, config.budget))

    def parts(self) -> Sequence[StatePart]:
        """Who holds these."""
        return self._slots, self._intake, self._kept

    @abstractmethod
    def _compress(self, keep: int) -> None:
        """Keep this many tokens, fewer than are held."""

    def append(self, step: StepKV) -> None:
        """Take one step; what is held is compressed first if the step would exceed the budget."""
        step = self._admit(step, self._kept.last_step).usable_only()
        T = len(step.positions)
        if not T:
            return
        if self._exceeds(T):
            self._compress(self._room_beside(T))
        self._kept.append(step)

    def _exceeds(self, tokens: int) -> bool:
        """Whether a step of so many tokens fits only behind a compression."""
        M: int = self._config.budget
        return len(self._kept) + min(tokens, M) > M

    def _room_beside(self, tokens: int) -> int:
        """How many tokens a compression keeps before a step of so many."""
        keep: int = min(self._config.compressed_tokens, max(0, self._config.budget - tokens))
        return keep

    def context(self) -> Context:
        """All slots; far are those that hold what the layers or heads chose for themselves."""
        none = torch.zeros(0, self._shape.position_components, dtype=torch.int64, device=self._kept.step.device)
        begin = self._slots.far.start
        context = self._slots.context(none, lambda: self._kept.positions)
        return replace(context, far=slice(begin, begin + self._kept.far))

    def report(self) -> dict[str, Any]:
        """Tokens held: the newest whole steps, and those that were chosen; the oldest step any of them is from."""
        kept = self._kept
        return {
            "near_tokens_in_use": sum(kept.lengths),
            "far_tokens_in_use": kept.far,
            "oldest_step": int(kept.step[:, :, 0].min()) if kept.lengths else None,
            "tokens_dropped": int(self._intake.dropped),
            "layers": [],
        }
