"""`ExactMemory`: what the memories share that hold exact tokens behind the prompt prefix and nothing else.

Such a memory is its slots and one near window over them. Owns how these are shown, saved and counted; which tokens
stay is for the memory that derives from it. Knows nothing of prototypes.

`SlidingWindow`: the last |M| visual tokens, exact, behind the prompt prefix. The baseline "SWA" of the ProtoKV paper
(arXiv 2606.26762).

The whole budget is the near window of `near`; what leaves it is forgotten.

`FullCache`: every token, exact. The upper bound that bounded memories are compared with.

It is NOT bounded: its bytes and the shape of its context grow with the stream, by doubling, and so does the
cost of attention. `budget` is the number of tokens that it makes room for at first, if that is no more than 16,384: a
state may have any budget, and what it holds is in its tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from protokv.core.context import Context
from protokv.core.memory import LocalMemory, MemoryShape
from protokv.core.near import NearWindow, Slots
from protokv.core.rotary import Rotary
from protokv.core.sanitize import Sanitizer
from protokv.core.step import StepKV
from protokv.core.tensors import Clock, StatePart, TensorSpec
from protokv.errors import StateCorrupt


class ExactMemory(LocalMemory):
    """The prompt prefix and a ring of exact tokens."""

    def __init__(self, config: Any, shape: MemoryShape, rotary: Rotary) -> None:
        super().__init__(config, shape, rotary)
        self._slots, self._near = self._allocate(self._first_room())

    def _first_room(self) -> int:
        """Tokens that room is made for at first."""
        return int(self._config.near_tokens)

    def _allocate(self, capacity: int) -> tuple[Slots, NearWindow]:
        slots = Slots(self._shape, far=0, near=capacity)
        return slots, NearWindow(slots, self._shape.position_components)

    @classmethod
    def declare(cls, config: Any, shape: MemoryShape) -> tuple[TensorSpec, ...]:
        """The prompt prefix and a window of W tokens, or of any number where it grows."""
        return (*Slots.declare(shape), *Sanitizer.declare(), *NearWindow.declare(shape, config.near_tokens))

    def parts(self) -> Sequence[StatePart]:
        """The prompt prefix and the window."""
        return self._slots, self._sanitizer, self._near

    def append(self, step: StepKV) -> None:
        """Take one step; the oldest ones are forgotten to make room."""
        self._near.append(self._admit(step, self._near.last_step))

    def context(self) -> Context:
        """All slots; their number changes only where the memory is unbounded and has grown."""
        return self._slots.context(self._near.positions)

    def report(self) -> dict[str, Any]:
        """Tokens held."""
        return {"near_tokens_in_use": len(self._near), "tokens_dropped": int(self._sanitizer.dropped), "layers": []}


class SlidingWindow(ExactMemory):
    """W = budget exact tokens, whole steps leaving oldest first."""


_FIRST_TOKENS = 1 << 14


class FullCache(ExactMemory):
    """All tokens of the stream. The state is that of a window which no step has left."""

    bounded = False

    @classmethod
    def declare(cls, config: Any, shape: MemoryShape) -> tuple[TensorSpec, ...]:
        """The prompt prefix and a window of any number of tokens."""
        return (*Slots.declare(shape), *Sanitizer.declare(), *NearWindow.declare(shape, None))

    def _first_room(self) -> int:
        return min(int(self._config.budget), _FIRST_TOKENS)

    def append(self, step: StepKV) -> None:
        """Take one step, in a buffer of twice the size if this one is full."""
        step = self._admit(step, self._near.last_step)
        capacity = self._near.step.shape[0]
        needed = len(self._near) + step.positions.shape[0]
        if needed > capacity:
            while capacity < needed:
                capacity *= 2
            self._move(self.held(), capacity)
        self._near.append(step)

    def _check(self, tensors: Mapping[str, Tensor], clock: Clock | None) -> None:
        super()._check(tensors, clock)
        if not tensors["near.step"].numel() or int(tensors["near.ring"][0]):
            raise StateCorrupt("state: tensor near.ring does not start at 0, or there is no room at all")

    def _take(self, tensors: Mapping[str, Tensor]) -> None:
        self._sanitizer.take(tensors)
        self._move(tensors, tensors["near.step"].numel())

    def _move(self, state: Mapping[str, Tensor], capacity: int) -> None:
        slots, near = self._allocate(capacity)
        near.take(state)
        slots.take(state)
        self._slots, self._near = slots, near
