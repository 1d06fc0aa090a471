"""`DurableConfig`: the settings of the agglomerative bank, the default memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final, Literal

from protokv.config.prototypes import PrototypeConfig
from protokv.errors import ConfigError

Rule = Literal["auto", "exact", "blocked"]

BLOCKED_FROM: Final = 512
"""Prototypes of a head from which on "auto" is the blocked rule; what it keeps and costs is measured in
`protokv.memory.protokv.policies.blocked`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DurableConfig(PrototypeConfig):
    """What keeps evidence longest by our own study (`samples/delay-study/`): the agglomerative bank, S = 1.

    What is distinct stays and what is redundant is merged (`protokv.memory.protokv.policies.agglomerative`), so a brief
    cue that is not seen again, the very evidence that a late question is about, is the last thing to go. Residual
    statistics are off: with S = 1 they show nothing.

    Attributes:
        rule: how the merges of a step are found. "exact" makes the cheapest of all, one after the other, and its work
            grows with the bank and with what happens in the video; "blocked" plans many at once in bounded, fixed work
            (`protokv.memory.protokv.policies.blocked`); "auto" is exact in banks of fewer than `blocked_from`
            prototypes and blocked in larger ones, where it keeps what the exact one keeps.
        blocked_from: prototypes of a head.
        merge_mass_power: in the cost of a merge a prototype of mass n weighs n to this power: 1 is Ward's cost, 0 takes
            no notice of the mass.
    """

    name: ClassVar[str] = "durable"
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {"merge_mass_power": (0, 1), "blocked_from": (2, 2**31)}

    pseudo_tokens: int = 1
    residual: bool = False
    rule: Rule = "auto"
    blocked_from: int = BLOCKED_FROM
    merge_mass_power: float = 1.0

    def check(self) -> None:
        """Refuse a blocked rule where there is nothing to plan for, or with residuals, which it does not keep."""
        super(DurableConfig, self).check()
        if self.rule == "blocked" and self.prototypes == 1:
            raise ConfigError("rule: 'blocked' merges prototypes with each other, and there is only one of them")
        if self.rule == "blocked" and self.residual:
            raise ConfigError("rule: 'blocked' keeps no residual statistics", hint="turn residual off")

    @property
    def is_blocked(self) -> bool:
        """Whether the rule that serves is the blocked one."""
        if self.rule == "auto":
            return self.prototypes >= self.blocked_from and not self.residual
        return self.rule == "blocked"
