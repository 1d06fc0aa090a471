"""`SlidingWindow`: the last |M| visual tokens, exact, behind the prompt prefix. The baseline "SWA" of the ProtoKV paper
(arXiv 2606.26762).

The whole budget is the near window of `near`; what leaves it is forgotten.
"""

from __future__ import annotations

from protokv.config import MemoryConfig
from protokv.memory.base import MemoryShape, StepKV
from protokv.memory.exact import ExactMemory
from protokv.memory.intake import Intake
from protokv.memory.near import NearWindow
from protokv.memory.slots import Slots
from protokv.rotary import Rotary


class SlidingWindow(ExactMemory):
    """W = budget exact tokens, whole steps leaving oldest first."""

    def __init__(self, config: MemoryConfig, shape: MemoryShape, rotary: Rotary) -> None:
        self._config, self._shape = config, shape
        self._intake = Intake(config, shape)
        self._slots = Slots(shape, far=0, near=config.near_tokens)
        self._near = NearWindow(self._slots, shape.position_components)

    def append(self, step: StepKV) -> None:
        """Take one step; the oldest ones are forgotten to make room."""
        step = self._admit(step, self._near.last_step)
        self._near.append(step)
