"""`DurableConfig`: the settings of the default memory."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Annotated, ClassVar, Literal, Self

from protokv.core.prototypes import PrototypeConfig
from protokv.core.settings import MOST_BUDGET
from protokv.texts import JsonObject

_CenterBits = Literal[8, 32]


@dataclass(frozen=True, slots=True, kw_only=True)
class DurableConfig(PrototypeConfig):
    """The default memory: distinct tokens stay and redundant ones merge (`durable.rule`).

    So a brief cue that never returns stays longest (`samples/studies/delay/`).

    Attributes:
        center_bits: bits of each number of a centre. 8 saves a byte (`durable.quantized`), 32
            float32, in four times the bytes; both hold a copy for attention, in the dtype of the
            model.
        words: whether the stream may have words; `ingest` sets it where there are subtitles. They
            merge with words alone (`durable.words`).
        step_tokens: cap on the near window, in tokens: one step. A longer window would hold the
            same still picture several times. 0: as many as the first step has.
        words_share: share of the budget that is for words. Words are tokens like any other if it
            is 0, or has no room for a prototype and a token.
    """

    name: ClassVar[str] = "durable"
    keeps: ClassVar[Literal["newest", "spread"]] = "newest"
    """What is kept from merging where tokens are new (`durable.novelty`)."""

    center_bits: _CenterBits = 8
    step_tokens: Annotated[int, 0, MOST_BUDGET] = 0
    words: bool = False
    words_share: Annotated[float, 0, 0.9] = 0.25

    @property
    def prototypes(self) -> int:
        """K, prototypes of each layer and KV head."""
        K = super(DurableConfig, self).prototypes
        return max(K, self.merged_budget - self.step_tokens) if K and self.step_tokens else K

    @property
    def words_tokens(self) -> int:
        """Return how many tokens of the budget are for words."""
        tokens = int(self.budget * self.words_share) if self.words else 0
        return tokens if tokens > 2 else 0

    def of_words(self) -> _WordsConfig | None:
        """Return the settings of the memory of words; None if words are tokens like any other."""
        if not self.words_tokens:
            return None
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return _WordsConfig(**own | {"words": False, "step_tokens": 0, "budget": self.words_tokens})

    @property
    def merged_budget(self) -> int:
        """Return what words leave of the budget."""
        return self.budget - self.words_tokens

    def to_dict(self) -> JsonObject:
        """Return plain values; without words nothing about them."""
        values = super(DurableConfig, self).to_dict()
        return (
            values
            if self.words
            else {name: value for name, value in values.items() if not name.startswith("words")}
        )

    def for_step(self, tokens: int) -> Self:
        """Return this config for steps of so many tokens, unless it has their number already."""
        return self if self.step_tokens else replace(self, step_tokens=tokens)

    def with_words(self, words: bool) -> Self:
        """Return this config for a stream with words, or without."""
        return replace(self, words=words)


@dataclass(frozen=True, slots=True, kw_only=True)
class _WordsConfig(DurableConfig):
    """The settings of a memory of words."""

    keeps: ClassVar[Literal["newest", "spread"]] = "spread"
