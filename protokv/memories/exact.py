"""Memories of exact tokens: `SlidingWindow` (bounded) and `FullCache` (unbounded), over the common `ExactMemory`.

`SlidingWindow` keeps the last `budget` visual tokens behind the prompt prefix: the baseline "SWA" of the ProtoKV paper,
arXiv 2606.26762. `FullCache` keeps every token: the upper bound that bounded memories are compared with. Its bytes, the
shape of its context and the cost of attention grow with the stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from torch import Tensor

from protokv.core.context import Context
from protokv.core.memory import LocalMemory
from protokv.core.near import NearWindow, Slots
from protokv.core.rotary import Rotary
from protokv.core.sanitize import Sanitizer
from protokv.core.step import StepKV
from protokv.core.tensors import Clock, MemoryShape, StatePart, TensorSpec
from protokv.errors import StateCorrupt
from protokv.memories.packed import declare_packed, entering, slots_of

# A state may have any budget, so a full cache makes room for this many tokens at first, or for its budget if smaller.
FIRST_TOKENS: Final = 1 << 14


class ExactMemory(LocalMemory):
    """The prompt prefix and a ring of exact tokens; subclasses decide which tokens stay."""

    def __init__(self, config: Any, shape: MemoryShape, rotary: Rotary) -> None:
        super().__init__(config, shape, rotary)
        self._slots, self._near = self._allocate(self._first_capacity())

    def _first_capacity(self) -> int:
        """Return the number of tokens to allocate at first."""
        return int(self._config.near_tokens)

    def _allocate(self, capacity: int) -> tuple[Slots, NearWindow]:
        slots = slots_of(self._config, self._shape, far=0, near=capacity)
        return slots, NearWindow(slots, self._shape.position_components)

    @classmethod
    def declare(cls, config: Any, shape: MemoryShape) -> tuple[TensorSpec, ...]:
        """Declare the prompt prefix and a window of W tokens."""
        window = declare_packed(config, NearWindow.declare(shape, config.near_tokens))
        return (*Slots.declare(shape), *Sanitizer.declare(), *window)

    def parts(self) -> Sequence[StatePart]:
        """Return the prompt prefix, the sanitizer and the window."""
        return self._slots, self._sanitizer, self._near

    def append(self, step: StepKV) -> None:
        """Take one step; the window evicts its oldest steps to make room."""
        self._near.append(entering(self._slots, self._admit(step, self._near.last_step)))

    def context(self) -> Context:
        """Return all slots. Their number is constant unless the memory is unbounded."""
        return self._slots.context(self._near.positions)

    def report(self) -> dict[str, Any]:
        """Return the number of tokens held and dropped."""
        return {"near_tokens_in_use": len(self._near), "tokens_dropped": int(self._sanitizer.dropped), "layers": []}


class SlidingWindow(ExactMemory):
    """W = budget exact tokens; whole steps leave, oldest first."""


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
            self._reallocate(self.held(), capacity)
        self._near.append(step)

    def _check(self, tensors: Mapping[str, Tensor], clock: Clock | None) -> None:
        super()._check(tensors, clock)
        if not tensors["near.step"].numel() or int(tensors["near.ring"][0]):
            raise StateCorrupt("state: tensor near.ring does not start at 0, or there is no room at all")

    def _take(self, tensors: Mapping[str, Tensor]) -> None:
        self._sanitizer.take(tensors)
        self._reallocate(tensors, tensors["near.step"].numel())

    def _reallocate(self, state: Mapping[str, Tensor], capacity: int) -> None:
        slots, near = self._allocate(capacity)
        near.take(state)
        slots.take(state)
        self._slots, self._near = slots, near
