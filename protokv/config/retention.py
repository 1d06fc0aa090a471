"""Settings of the memories that keep exact tokens and throw others away, and of the one that keeps all."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from protokv.config.base import MemoryConfig, check_range


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindowConfig(MemoryConfig):
    """The last `budget` tokens; it has no constants."""

    kind: ClassVar[str] = "sliding-window"


@dataclass(frozen=True, slots=True, kw_only=True)
class FullConfig(MemoryConfig):
    """Everything; the budget is not a bound but the number of tokens that it makes room for at first."""

    kind: ClassVar[str] = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class InfiniPotVConfig(MemoryConfig):
    """InfiniPot-V: what is held is compressed whenever the next step would exceed the budget.

    Attributes:
        kept_share: |C| / |M|, fraction of the budget that a compression keeps. What it frees is the room for new steps.
        redundancy_share: alpha, fraction of the kept tokens that temporal redundancy chooses, the recent steps
            included; the value norm chooses the others.
        recent_share: fraction of what is held at a compression that the recent steps may be, which are kept whole and
            which older tokens are compared with; the newest step always counts. 0.25 is the default of the released
            code, and with kept_share = 0.75 it means: exactly the steps since the last compression. The ProtoKV paper
            says gamma = 0.125 "as in the original work"; that figure is not in the released code, so the code decides.
    """

    kind: ClassVar[str] = "infinipot-v"
    kept_share: float = 0.75
    redundancy_share: float = 0.5
    recent_share: float = 0.25

    def __post_init__(self) -> None:
        # Not super(): a dataclass with slots is another class than the one that this body belongs to.
        MemoryConfig.__post_init__(self)
        for name in ("kept_share", "redundancy_share", "recent_share"):
            check_range(name, getattr(self, name), 0, 1)

    @property
    def compressed_tokens(self) -> int:
        """|C|, tokens that a compression keeps in each layer and KV head; fewer if a step needs more room."""
        return int(Fraction(repr(self.kept_share)) * self.budget)


@dataclass(frozen=True, slots=True, kw_only=True)
class LastFramesConfig(MemoryConfig):
    """The last steps and nothing else.

    Attributes:
        last_steps: N, steps that a question sees, fewer where they would exceed the budget. A step is one sampled frame
            or one temporal patch of two; SimpleStream's default is 4 frames.
    """

    kind: ClassVar[str] = "last-frames"
    last_steps: int = 4

    def __post_init__(self) -> None:
        # Not super(): a dataclass with slots is another class than the one that this body belongs to.
        MemoryConfig.__post_init__(self)
        check_range("last_steps", self.last_steps, 1, None)
