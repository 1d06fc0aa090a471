"""Settings of the memories that keep exact tokens and throw others away, and of the one that keeps all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from protokv.config.base import MemoryConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindowConfig(MemoryConfig):
    """The last `budget` tokens; it has no constants."""

    kind: ClassVar[str] = "sliding-window"


@dataclass(frozen=True, slots=True, kw_only=True)
class FullConfig(MemoryConfig):
    """Everything; the budget is not a bound but the number of tokens that it makes room for at first."""

    kind: ClassVar[str] = "full"
