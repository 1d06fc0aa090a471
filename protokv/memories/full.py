"""`FullCache`: every token, the upper bound that bounded memories are compared with.

Its bytes, the shape of its context and the cost of attention grow with the stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from torch import Tensor

from protokv.core.near import NearWindow, Slots
from protokv.core.sanitize import Sanitizer
from protokv.core.settings import MemoryConfig
from protokv.core.step import StepKV
from protokv.core.tensors import MemoryShape, TensorSpec
from protokv.memories.exact import ExactMemory

# A state may have any budget, so a full cache makes room for this many tokens at first, or for its budget if smaller.
FIRST_TOKENS: Final = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class FullConfig(MemoryConfig):
    """Every token. The budget is no bound, only the room allocated at first."""

    name: ClassVar[str] = "full"


class FullCache(ExactMemory):
    """All tokens of the stream, in a window that doubles when it is full and never evicts."""

    bounded = False

    @classmethod
    def declare(cls, config: Any, shape: MemoryShape) -> tuple[TensorSpec, ...]:
        """Declare the prompt prefix and a window of any number of tokens."""
        return (*Slots.declare(shape), *Sanitizer.declare(), *NearWindow.declare(shape, None))

    def _first_capacity(self) -> int:
        return min(int(self._config.budget), FIRST_TOKENS)

    def append(self, step: StepKV) -> None:
        """Take one step; double the window first if the step does not fit."""
        step = self._admit(step, self._near.last_step)
        capacity = self._near.step.shape[0]
        needed = len(self._near) + step.positions.shape[0]
        if needed > capacity:
            while capacity < needed:
                capacity *= 2
            self._reallocate(self.live_tensors(), capacity)
        self._near.append(step)

    def _take(self, tensors: Mapping[str, Tensor]) -> None:
        self._sanitizer.take(tensors)
        self._reallocate(tensors, max(1, tensors["near.step"].numel()))

    def _reallocate(self, state: Mapping[str, Tensor], capacity: int) -> None:
        slots, near = self._allocate(capacity)
        near.take(state)
        slots.take(state)
        self._slots, self._near = slots, near


FullConfig.memory = FullCache
