"""`DurableConfig`: the settings of the default memory."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar, Literal, Self

from protokv.core.prototypes import PrototypeConfig

CenterBits = Literal[8, 32]


@dataclass(frozen=True, slots=True, kw_only=True)
class DurableConfig(PrototypeConfig):
    """The default memory: distinct tokens stay and redundant ones merge (`durable.rule`).

    So a brief cue that never returns stays longest (`samples/studies/delay/`).

    Attributes:
        center_bits: bits of each number of a centre. 8 stores a byte and decodes it when it is read
            (`durable.quantized`); 32 stores float32 and a copy for attention, in four times the bytes and more.
        words: whether the stream may have words; `ingest` sets it where there are subtitles. They merge with words
            alone (`durable.words`).
        words_share: share of the budget that is for words; at 0 they are tokens like any other, as they are where it
            has no room for a prototype and a token.
    """

    name: ClassVar[str] = "durable"
    keeps: ClassVar[Literal["newest", "spread"]] = "newest"
    """What is kept from merging where tokens are new (`durable.novelty`)."""

    center_bits: CenterBits = 8
    words: bool = False
    words_share: Annotated[float, 0, 0.9] = 0.25

    @property
    def words_tokens(self) -> int:
        """Return how many tokens of the budget are for words."""
        tokens = int(self.budget * self.words_share) if self.words else 0
        return tokens if tokens > 2 else 0

    def of_words(self) -> WordsConfig | None:
        """Return the settings of the memory of words; None if words are tokens like any other."""
        if not self.words_tokens:
            return None
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return WordsConfig(**own | {"words": False, "budget": self.words_tokens})

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


@dataclass(frozen=True, slots=True, kw_only=True)
class WordsConfig(DurableConfig):
    """The settings of a memory of words."""

    keeps: ClassVar[Literal["newest", "spread"]] = "spread"
