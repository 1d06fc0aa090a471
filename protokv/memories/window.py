"""`SlidingWindow`: the last `budget` visual tokens after the prompt prefix, the baseline "SWA" of the ProtoKV paper,
arXiv 2606.26762.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from protokv.core.settings import MemoryConfig
from protokv.memories.exact import ExactMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindowConfig(MemoryConfig):
    """The last `budget` tokens. No constants."""

    name: ClassVar[str] = "sliding-window"


class SlidingWindow(ExactMemory):
    """W = budget exact tokens; whole steps leave, oldest first."""


SlidingWindowConfig.memory = SlidingWindow
