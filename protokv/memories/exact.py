"""`ExactMemory`: the prompt prefix and a ring of exact tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from protokv.core.context import Context
from protokv.core.memory import LocalMemory
from protokv.core.near import NearWindow, Slots
from protokv.core.rotary import Rotary
from protokv.core.step import StepKV
from protokv.core.tensors import MemoryShape, StatePart, TensorSpec


class ExactMemory(LocalMemory):
    """The prompt prefix and a ring of exact tokens; subclasses decide which tokens stay."""

    def __init__(self, config: Any, shape: MemoryShape, rotary: Rotary) -> None:
        super().__init__(config, shape, rotary)
        self._slots, self._near = self._allocate(self._first_capacity())

    def _first_capacity(self) -> int:
        """Return the number of tokens to allocate at first."""
        return int(self._config.near_tokens)

    def _allocate(self, capacity: int) -> tuple[Slots, NearWindow]:
        slots = Slots(self._shape, far=0, near=capacity)
        return slots, NearWindow(slots, self._shape.position_components)

    @classmethod
    def declare(cls, config: Any, shape: MemoryShape) -> tuple[TensorSpec, ...]:
        """Declare a window of W tokens besides."""
        return (*super().declare(config, shape), *NearWindow.declare(shape, config.near_tokens))

    def parts(self) -> Sequence[StatePart]:
        """Return the window besides."""
        return (*super().parts(), self._near)

    def append(self, step: StepKV) -> None:
        """Take one step; the window evicts its oldest steps to make room."""
        self._near.append(self._admit(step, self._near.last_step))

    def context(self) -> Context:
        """Return all slots. Their number is constant unless the memory is unbounded."""
        return self._slots.context(self._near.positions)

    def report(self) -> dict[str, Any]:
        """Return the number of tokens held and dropped."""
        return {"near_tokens_in_use": len(self._near)} | super().report()
