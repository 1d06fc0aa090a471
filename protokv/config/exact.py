"""Settings of the plain baselines: the last tokens, the last steps, or everything, exact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from protokv.config.base import MOST_TOKENS, MemoryConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindowConfig(MemoryConfig):
    """The last `budget` tokens; it has no constants."""

    name: ClassVar[str] = "sliding-window"


@dataclass(frozen=True, slots=True, kw_only=True)
class FullConfig(MemoryConfig):
    """Everything; the budget is not a bound but the number of tokens that it makes room for at first."""

    name: ClassVar[str] = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class LastFramesConfig(MemoryConfig):
    """The last steps and nothing else.

    Attributes:
        last_steps: N, steps that a question sees, fewer where they would exceed the budget. A step is one sampled frame
            or one temporal patch of two; SimpleStream's default is 4 frames.
    """

    name: ClassVar[str] = "last-frames"
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {"last_steps": (1, MOST_TOKENS)}

    last_steps: int = 4

    @property
    def horizon(self) -> int:
        """N, and the step before them, behind which the first of them is placed where positions are compact."""
        return max(self.last_steps + 1, self.recent_frames)
