"""`FullCache`: every token, the upper bound that bounded memories are compared with; it grows with
the stream.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

from protokv.core.memory import SingleDeviceMemory
from protokv.core.near import NearWindow
from protokv.core.settings import MemoryConfig
from protokv.core.step import StepKV
from protokv.core.tensors import MemoryShape, Specs, Tensors
from protokv.memories.window import SlidingWindow

# A state may have any budget, so a full cache makes room for this many tokens at first, or for its
# budget if smaller.
_FIRST_TOKENS = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class FullConfig(MemoryConfig):
    """Every token. The budget is no bound, only the room allocated at first."""

    name: ClassVar[str] = "full"


class FullCache(SlidingWindow[FullConfig]):
    """All tokens of the stream, in a window that doubles when it is full and never evicts."""

    bounded = False
    context_key: Hashable = None  # the buffers move when they grow

    @classmethod
    def declare(cls, config: FullConfig, shape: MemoryShape) -> Specs:
        """Declare a window of any number of tokens."""
        return (*SingleDeviceMemory.declare(config, shape), *NearWindow.declare(shape, None))

    def _first_capacity(self) -> int:
        return min(int(self._config.budget), _FIRST_TOKENS)

    def append(self, step: StepKV) -> None:
        """Take one step; double the window first if the step does not fit."""
        capacity = len(self._near.step)
        needed = len(self._near) + len(step.positions)
        if needed > capacity:
            while capacity < needed:
                capacity *= 2
            state = self.live_tensors()
            self._slots, self._near = self._allocate(capacity)
            self._near.take(state)
            self._slots.take(state)
        super().append(step)

    def load(self, tensors: Tensors) -> None:
        """Take a state whose form is checked, into a window of its size."""
        self._slots, self._near = self._allocate(max(1, len(tensors["near.step"])))
        super().load(tensors)


FullConfig.memory = FullCache
