"""`DurableConfig`: the settings of the agglomerative memory, the default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Final, Literal, Self

from protokv.core.prototypes import PrototypeConfig
from protokv.errors import ConfigError

RuleName = Literal["auto", "exact", "blocked"]
CenterBits = Literal["auto", 8, 32]

BLOCKED_FROM: Final = 512
"""Prototypes of a head from which on "auto" chooses the blocked rule; `durable` has the measurements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DurableConfig(PrototypeConfig):
    """The default memory: an agglomerative bank.

    Distinct tokens stay and redundant ones merge (`durable.agglomerative`), so a brief cue that never returns
    stays longest (`samples/studies/delay/`).

    Attributes:
        rule: how merges are found. "exact" makes the cheapest merge, again and again; its work grows with the bank and
            with changes in the video. "blocked" plans many merges at once with fixed work (`durable`). "auto"
            is exact below `BLOCKED_FROM` prototypes a head and blocked from there on.
        merge_mass_power: a prototype of mass n weighs n to this power in the cost of a merge. 1 is Ward's cost; 0
            ignores the mass.
        center_bits: bits of each number of a centre. 32 stores float32 and a copy for attention. 8 stores a byte and
            decodes it when it is read: less than a quarter of the memory, slower steps (`durable.quantized`). "auto" is
            8 below `BLOCKED_FROM` prototypes a head, where answers are as good in a third of the bytes
            (`samples/studies/harder/`), else 32.
        words: whether the stream may have words; `ingest` sets it where there are subtitles. They merge with words
            alone (`durable.words`).
        words_share: share of the budget that is for words; at 0 they are tokens like any other, as they are where it
            has no room for a prototype and a token.
    """

    name: ClassVar[str] = "durable"
    keeps: ClassVar[Literal["newest", "spread"]] = "newest"
    """What is kept from merging where tokens are new (`durable.novelty`)."""
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {"merge_mass_power": (0, 1), "words_share": (0, 0.9)}

    rule: RuleName = "auto"
    merge_mass_power: float = 1.0
    center_bits: CenterBits = "auto"
    words: bool = False
    words_share: float = 0.25

    @property
    def words_tokens(self) -> int:
        """Return how many tokens of the budget are for words."""
        tokens = int(self.budget * self.words_share) if self.words else 0
        return tokens if tokens > 2 else 0

    def of_words(self) -> WordsConfig | None:
        """Return the settings of the memory of words; None if words are tokens like any other."""
        if not self.words_tokens:
            return None
        # As pictures are held: the exact rule along with the blocked one would take most of a step.
        held = self.resolve()
        own = {field.name: getattr(held, field.name) for field in fields(held)}
        words = WordsConfig(**own | {"words": False, "budget": self.words_tokens, "rule": "exact"})
        return words if words.prototypes == 1 else replace(words, rule=held.rule)

    @property
    def merged_budget(self) -> int:
        """Return what words leave of the budget."""
        return self.budget - self.words_tokens

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; without words nothing about them."""
        values = super(DurableConfig, self).to_dict()
        return values if self.words else {name: value for name, value in values.items() if not name.startswith("words")}

    def with_words(self, words: bool) -> Self:
        """Return this config for a stream with words, or without."""
        return replace(self, words=words)

    def check(self) -> None:
        """Refuse the blocked rule where there is nothing to merge."""
        super(DurableConfig, self).check()
        if self.rule == "blocked" and self.prototypes == 1:
            raise ConfigError("rule: 'blocked' needs at least two prototypes to merge")

    @property
    def is_quantized(self) -> bool:
        """Return True if centres are held in 8 bits."""
        return 0 < self.prototypes < BLOCKED_FROM if self.center_bits == "auto" else self.center_bits == 8

    @property
    def is_blocked(self) -> bool:
        """Return True if the blocked rule is in use."""
        return self.prototypes >= BLOCKED_FROM if self.rule == "auto" else self.rule == "blocked"

    def resolve(self) -> Self:
        """Return this config with "auto" replaced by the rule and the bits in use."""
        return replace(self, rule="blocked" if self.is_blocked else "exact", center_bits=8 if self.is_quantized else 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class WordsConfig(DurableConfig):
    """The settings of a memory of words."""

    keeps: ClassVar[Literal["newest", "spread"]] = "spread"
