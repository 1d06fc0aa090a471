"""Settings of the memories to compare with: sliding window, full cache, last frames, DyCoke, HERMES, InfiniPot-V, ReKV.

Sources: DyCoke arXiv 2411.15024, InfiniPot-V arXiv 2506.15745, ReKV arXiv 2503.00540.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Final, Literal

from protokv.core.settings import MOST_TOKENS, MemoryConfig, Positions
from protokv.errors import ConfigError

LOCAL_TOKENS: Final = 15_000
"""The local window of ReKV's released code."""


KVBits = Literal["model", 8]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensConfig(MemoryConfig):
    """A bounded memory of exact tokens.

    Attributes:
        kv_bits: bits of each number of a key or value. "model" is the model's dtype. 8 rounds each token once, when it
            enters, as `durable` rounds its centres, so that memories can be compared at equal bytes.
    """

    kv_bits: KVBits = "model"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; `kv_bits` only where it is 8, as states and rows from before it have it."""
        values = super(TokensConfig, self).to_dict()
        return {name: value for name, value in values.items() if name != "kv_bits" or value == 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindowConfig(TokensConfig):
    """The last `budget` tokens. No constants."""

    name: ClassVar[str] = "sliding-window"


@dataclass(frozen=True, slots=True, kw_only=True)
class FullConfig(MemoryConfig):
    """Every token. The budget is no bound, only the room allocated at first."""

    name: ClassVar[str] = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class LastFramesConfig(TokensConfig):
    """The last steps and nothing else.

    Attributes:
        last_steps: N, the steps that a question sees; fewer if N steps exceed the budget. A step is one sampled frame
            or one temporal patch of two frames. SimpleStream's default is 4 frames.
    """

    name: ClassVar[str] = "last-frames"
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {"last_steps": (1, MOST_TOKENS)}

    last_steps: int = 4

    @property
    def horizon(self) -> int:
        """Return N + 1: with compact positions, the first of the N steps is placed behind the one before it."""
        return max(self.last_steps + 1, self.recent_frames)


@dataclass(frozen=True, slots=True, kw_only=True)
class DyCokeConfig(TokensConfig):
    """DyCoke's temporal token merging in front of a sliding window of `budget` tokens.

    Attributes:
        merge_share: k, fraction of the visual tokens that is dropped from a step compared with an earlier one.
    """

    name: ClassVar[str] = "dycoke"
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {"merge_share": (0, 1)}

    merge_share: float = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class DyCokeDecodeConfig(MemoryConfig):
    """DyCoke's pruning while an answer is decoded, over a full cache. The budget is the room allocated at first.

    Attributes:
        prune_share: p, fraction of the visual tokens that pruned layers leave out. 0.7 is the released README's; its
            code has 0.8.
        first_pruned_layer: l, index of the first layer that is pruned; the layer before it chooses the tokens.
    """

    name: ClassVar[str] = "dycoke-decode"
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {"prune_share": (0, 1), "first_pruned_layer": (1, 10_000)}

    prune_share: float = 0.7
    first_pruned_layer: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedConfig(TokensConfig):
    """Exact tokens, compressed whenever the next step would exceed the budget.

    Attributes:
        kept_share: fraction of the budget that a compression keeps; the rest is room for new steps.
    """

    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {"kept_share": (0, 1)}

    kept_share: float = 0.75

    @property
    def compressed_tokens(self) -> int:
        """|C|, tokens that a compression keeps in each layer and KV head; fewer if a step needs more room."""
        return int(Fraction(repr(self.kept_share)) * self.budget)


@dataclass(frozen=True, slots=True, kw_only=True)
class HermesConfig(CompressedConfig):
    """HERMES. The released code compresses to the whole budget after chunks of 16 frames, and holds more in between.

    Attributes:
        shallow_share: fraction of the layers, from the first on, that rank by recency alone.
        deep_share: fraction of the layers, up to the last, that rank by attention alone and keep a summary token.
    """

    name: ClassVar[str] = "hermes"
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {"shallow_share": (0, 1), "deep_share": (0, 1)}

    shallow_share: float = 0.1
    deep_share: float = 0.3

    def check(self) -> None:
        """Refuse bands that overlap."""
        if self.shallow_share + self.deep_share > 1:
            shares = f"{self.shallow_share} and {self.deep_share}"
            raise ConfigError(f"shallow_share and deep_share: expected at most 1 together, got {shares}")


@dataclass(frozen=True, slots=True, kw_only=True)
class InfiniPotVConfig(CompressedConfig):
    """InfiniPot-V.

    Attributes:
        redundancy_share: alpha, fraction of the kept tokens that temporal redundancy chooses, the recent steps
            included; the value norm chooses the others.
        recent_share: largest fraction of the tokens at a compression that counts as recent steps. Recent steps are kept
            whole, and older tokens are compared with them. The newest step is always recent. 0.25 is the released
            code's default; with kept_share = 0.75 it means exactly the steps since the last compression. The ProtoKV
            paper says gamma = 0.125 "as in the original work"; the released code does not have that figure, so the
            code decides.
    """

    name: ClassVar[str] = "infinipot-v"
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {"redundancy_share": (0, 1), "recent_share": (0, 1)}

    redundancy_share: float = 0.5
    recent_share: float = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class ReKVConfig(MemoryConfig):
    """ReKV: every token is kept outside the device, and each layer retrieves blocks for a question.

    Attributes:
        positions: as for every memory. "compact", as published, packs the retrieved tokens behind the prompt prefix.
    """

    name: ClassVar[str] = "rekv"

    positions: Positions = "compact"

    @property
    def near_tokens(self) -> int:
        """W, tokens of the window that new steps attend to."""
        return min(LOCAL_TOKENS, self.budget)
