"""`DurableConfig`: the settings of the agglomerative memory, the default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Final, Literal, Self

from protokv.config.prototypes import PrototypeConfig
from protokv.errors import ConfigError

Rule = Literal["auto", "exact", "blocked"]
CenterBits = Literal["auto", 8, 32]

BLOCKED_FROM: Final = 512
"""Prototypes of a head from which on "auto" is the blocked rule; what it keeps and costs is measured in
`protokv.durable`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DurableConfig(PrototypeConfig):
    """What keeps evidence longest by our own study (`samples/studies/delay/`): the agglomerative bank, S = 1.

    Distinct tokens stay and redundant ones merge (`protokv.durable.agglomerative`), so a brief cue that is not seen
    again, the evidence of a late question, is kept longest. Residual statistics are off: at no budget are they worth
    their bytes (`samples/studies/harder/`).

    Attributes:
        rule: how the merges of a step are found. "exact" makes the cheapest of all, one after the other, and its work
            grows with the bank and with the changes in the video; "blocked" plans many at once in bounded, fixed work
            (`protokv.durable`); "auto" is exact in banks of fewer than `blocked_from`
            prototypes and blocked in larger ones, where it keeps the same.
        blocked_from: prototypes of a head from which on "auto" chooses the blocked rule.
        merge_mass_power: in the cost of a merge a prototype of mass n weighs n to this power: 1 is Ward's cost, 0 takes
            no notice of the mass.
        center_bits: bits of each number of a centre. 32 holds float32, and a copy for attention; 8 holds a byte and
            decodes it where it is read, in less than a quarter of the memory and with slower steps
            (`protokv.durable.quantized`). 8 needs S = 1 and no residuals. "auto" is 8 where it can be, in
            banks of fewer than `blocked_from` prototypes, which answer as well in a third of the bytes
            (`samples/studies/harder/`), and 32 in larger ones, where decoding takes longer than all else.
    """

    name: ClassVar[str] = "durable"
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {
        "merge_mass_power": (0, 1),
        "blocked_from": (2, 2**31),
    }

    pseudo_tokens: int = 1
    residual: bool = False
    rule: Rule = "auto"
    blocked_from: int = BLOCKED_FROM
    merge_mass_power: float = 1.0
    center_bits: CenterBits = "auto"

    def check(self) -> None:
        """Refuse a blocked rule over one prototype, and settings that it or quantized centres do not support."""
        super(DurableConfig, self).check()
        if self.rule == "blocked" and self.prototypes == 1:
            raise ConfigError("rule: 'blocked' merges prototypes with each other, and there is only one of them")
        if self.rule == "blocked" and self.residual:
            raise ConfigError("rule: 'blocked' keeps no residual statistics", hint="turn residual off")
        if self.center_bits == 8 and not self._can_be_quantized:
            raise ConfigError(
                "center_bits: centres of 8 bits are shown once, and without residual statistics",
                hint="turn residual off and leave pseudo_tokens at 1",
            )

    @property
    def is_quantized(self) -> bool:
        """Return True if centres are held in 8 bits."""
        if self.center_bits == "auto":
            return self._can_be_quantized and 0 < self.prototypes < self.blocked_from
        return self.center_bits == 8

    @property
    def _can_be_quantized(self) -> bool:
        return not self.residual and self.pseudo_tokens == 1

    @property
    def is_blocked(self) -> bool:
        """Return True if the blocked rule serves."""
        if self.rule == "auto":
            return self.prototypes >= self.blocked_from and not self.residual
        return self.rule == "blocked"

    def resolve(self) -> Self:
        """Return this config with the rule and the bits that "auto" stands for."""
        return replace(self, rule="blocked" if self.is_blocked else "exact", center_bits=8 if self.is_quantized else 32)
