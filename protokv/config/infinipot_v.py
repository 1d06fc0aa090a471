"""`InfiniPotVConfig`: the settings of InfiniPot-V (arXiv 2506.15745)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from protokv.config.base import MemoryConfig


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

    name: ClassVar[str] = "infinipot-v"
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {
        "kept_share": (0, 1),
        "redundancy_share": (0, 1),
        "recent_share": (0, 1),
    }

    kept_share: float = 0.75
    redundancy_share: float = 0.5
    recent_share: float = 0.25

    @property
    def compressed_tokens(self) -> int:
        """|C|, tokens that a compression keeps in each layer and KV head; fewer if a step needs more room."""
        return int(Fraction(repr(self.kept_share)) * self.budget)
