"""`SlidingWindow`: the last `budget` visual tokens after the prompt prefix, the baseline "SWA" of
the ProtoKV paper, arXiv 2606.26762.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from typing_extensions import TypeVar

from protokv.core.context import Context
from protokv.core.memory import SingleDeviceMemory
from protokv.core.near import NearWindow, WindowMove
from protokv.core.rotary import Rotary
from protokv.core.settings import MemoryConfig
from protokv.core.slots import KVSlots
from protokv.core.step import StepKV
from protokv.core.tensors import MemoryShape, Specs, StateTensors
from protokv.device.runs import Plan
from protokv.texts import JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindowConfig(MemoryConfig):
    """The last `budget` tokens. No constants."""

    name: ClassVar[str] = "sliding-window"


WindowT = TypeVar("WindowT", bound=MemoryConfig, default=MemoryConfig)


class SlidingWindow(SingleDeviceMemory[WindowT]):
    """The prompt prefix and a ring of W exact tokens; whole steps leave, oldest first."""

    context_key: Hashable = "slots"

    def __init__(self, config: WindowT, shape: MemoryShape, rotary: Rotary) -> None:
        super().__init__(config, shape, rotary)
        self._slots, self._near = self._allocate(self._first_capacity())

    def _first_capacity(self) -> int:
        """Return the number of tokens to allocate at first."""
        return self._config.near_tokens

    def _allocate(self, capacity: int) -> tuple[KVSlots, NearWindow]:
        slots = KVSlots(self._shape, far=0, near=capacity)
        return slots, NearWindow(slots, self._shape.position_components)

    @classmethod
    def declare(cls, config: WindowT, shape: MemoryShape) -> Specs:
        """Declare a window of W tokens besides."""
        return (*super().declare(config, shape), *NearWindow.declare(shape, config.near_tokens))

    def parts(self) -> Sequence[StateTensors]:
        """Return the window besides."""
        return (*super().parts(), self._near)

    def plan(self, step: StepKV) -> Plan:
        """Return the move of the window."""
        return self._near.plan(step.step, len(step.positions))

    def apply(self, key: WindowMove, numbers: Tensor, step: StepKV) -> None:
        """Take a planned step."""
        self._near.begin(key, numbers)
        self._near.write(step)

    def context(self) -> Context:
        """Return all slots."""
        return self._slots.context(self._near.positions)

    def report(self) -> JsonObject:
        """Return the number of tokens held and dropped."""
        return {"near_tokens_in_use": len(self._near)} | super().report()


SlidingWindowConfig.memory = SlidingWindow
