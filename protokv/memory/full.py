"""`FullCache`: every token, exact. The upper bound that bounded memories are compared with.

It is NOT bounded: its bytes and the shape of its context grow with the stream, by doubling, and so does the
cost of attention. `budget` is the number of tokens that it makes room for at first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from protokv.config import MemoryConfig
from protokv.errors import StateCorrupt
from protokv.memory.base import MemoryShape, StepKV, require
from protokv.memory.exact import ExactMemory
from protokv.memory.near import NearWindow
from protokv.memory.slots import Slots
from protokv.rotary import Rotary

# The axis of each tensor along which the cache grows.
_GROWING = {"near.keys": 2, "near.values": 2, "near.positions": 0, "near.coordinates": 0, "near.step": 0}


class FullCache(ExactMemory):
    """All tokens of the stream. The state is that of a window which no step has left."""

    bounded: ClassVar[bool] = False

    def __init__(self, config: MemoryConfig, shape: MemoryShape, rotary: Rotary) -> None:
        self._shape = shape
        self._slots, self._near = self._allocate(config.budget)

    def _allocate(self, capacity: int) -> tuple[Slots, NearWindow]:
        slots = Slots(self._shape, far=0, near=capacity)
        return slots, NearWindow(slots, self._shape.position_components)

    def append(self, step: StepKV) -> None:
        """Take one step, in a buffer of twice the size if this one is full."""
        self._slots.check(step, self._shape, self._near.last_step)
        capacity = self._near.step.shape[0]
        needed = len(self._near) + step.positions.shape[0]
        if needed > capacity:
            state = self.tensors()
            while capacity < needed:
                capacity *= 2
            self._take(state, capacity)
        self._near.append(step)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take a state that `tensors` gave, of any length."""
        if "near.step" not in tensors:
            raise StateCorrupt("state: tensor near.step is missing")
        capacity = tensors["near.step"].numel()
        empty = dict(self._slots.spec()) | dict(self._near.spec())
        for name, axis in _GROWING.items():
            size, dtype = empty[name]
            empty[name] = ((*size[:axis], capacity, *size[axis + 1 :]), dtype)
        require(tensors, empty)
        if capacity == 0 or int(tensors["near.ring"][0]):
            raise StateCorrupt("state: tensor near.ring does not start at 0, or there is no room at all")
        self._take(tensors, capacity)

    def _take(self, state: Mapping[str, Tensor], capacity: int) -> None:
        slots, near = self._allocate(capacity)
        near.load(state)
        slots.load(state)
        self._slots, self._near = slots, near
