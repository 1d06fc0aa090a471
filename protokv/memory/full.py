"""`FullCache`: every token, exact. The upper bound that bounded memories are compared with.

It is NOT bounded: its bytes and the shape of its context grow with the stream, by doubling, and so does the
cost of attention. `budget` is the number of tokens that it makes room for at first, if that is no more than 16,384: a
state may have any budget, and what it holds is in its tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from protokv.errors import StateCorrupt
from protokv.memory.base import MemoryShape, StepKV
from protokv.memory.exact import ExactMemory
from protokv.memory.intake import Intake
from protokv.memory.near import NearWindow
from protokv.memory.slots import Slots
from protokv.memory.state import Clock, TensorSpec

_FIRST_TOKENS = 1 << 14


class FullCache(ExactMemory):
    """All tokens of the stream. The state is that of a window which no step has left."""

    bounded = False

    @classmethod
    def declare(cls, config: Any, shape: MemoryShape) -> tuple[TensorSpec, ...]:
        """The prompt prefix and a window of any number of tokens."""
        return (*Slots.declare(shape), *Intake.declare(), *NearWindow.declare(shape, None))

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
        self._intake.take(tensors)
        self._move(tensors, tensors["near.step"].numel())

    def _move(self, state: Mapping[str, Tensor], capacity: int) -> None:
        slots, near = self._allocate(capacity)
        near.take(state)
        slots.take(state)
        self._slots, self._near = slots, near
