"""`ExactMemory`: what the memories share that hold exact tokens behind the prompt prefix and nothing else.

Such a memory is its slots and one near window over them. Owns how these are shown, saved and counted; which tokens
stay is for the memory that derives from it. Knows nothing of prototypes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from protokv.context import Context
from protokv.memory.base import MemoryShape, StepKV
from protokv.memory.intake import Intake
from protokv.memory.local import LocalMemory
from protokv.memory.near import NearWindow
from protokv.memory.slots import Slots
from protokv.memory.state import StatePart, TensorSpec
from protokv.rotary import Rotary


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
        return (*Slots.declare(shape), *Intake.declare(), *NearWindow.declare(shape, config.near_tokens))

    def parts(self) -> Sequence[StatePart]:
        """The prompt prefix and the window."""
        return self._slots, self._intake, self._near

    def append(self, step: StepKV) -> None:
        """Take one step; the oldest ones are forgotten to make room."""
        self._near.append(self._admit(step, self._near.last_step))

    def context(self) -> Context:
        """All slots; their number changes only where the memory is unbounded and has grown."""
        return self._slots.context(self._near.positions)

    def report(self) -> dict[str, Any]:
        """Tokens held."""
        return {"near_tokens_in_use": len(self._near), "tokens_dropped": int(self._intake.dropped), "layers": []}
