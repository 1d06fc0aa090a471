"""`ExactMemory`: what the memories share that hold exact tokens behind the prompt prefix and nothing else.

Such a memory is its slots and one near window over them. Owns how these are shown, saved and counted; which tokens
stay is for the memory that derives from it. Knows nothing of prototypes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from protokv.context import Context
from protokv.memory.base import Memory, MemoryShape
from protokv.memory.near import LAYER_AXIS, NearWindow
from protokv.memory.slots import Slots


class ExactMemory(Memory):
    """The prompt prefix and a ring of exact tokens."""

    layer_axis: ClassVar[Mapping[str, int | None]] = LAYER_AXIS

    _shape: MemoryShape
    _slots: Slots
    _near: NearWindow

    def start(self, keys: Tensor, values: Tensor) -> None:
        """Take the prompt prefix."""
        self._slots.start(keys, values)

    def context(self) -> Context:
        """All slots; their number changes only where the memory is unbounded and has grown."""
        return self._slots.context(self._near.positions)

    def tensors(self) -> dict[str, Tensor]:
        """The state: sink and tokens, the room that is left included."""
        return self._slots.tensors() | self._near.tensors()

    def nbytes(self) -> dict[str, int]:
        """Bytes by part, the room that is left included."""
        return {"sink": self._slots.sink_nbytes(), "near": self._near.nbytes()}

    def report(self) -> dict[str, Any]:
        """Tokens held."""
        return {"near_tokens_in_use": len(self._near), "layers": []}
