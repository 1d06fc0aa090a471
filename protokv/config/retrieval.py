"""Settings of the memory that retrieves by question, and of the two mechanisms of DyCoke."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from protokv.config.base import MemoryConfig, Positions, check_range
from protokv.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ReKVConfig(MemoryConfig):
    """ReKV: everything is kept outside the device, and each layer retrieves what a question is about.

    Attributes:
        positions: as for every memory; "compact", the published way, packs what was retrieved behind the prompt prefix.
        local_tokens: tokens of the window that new steps attend to, never more than the budget. 15000 is the released
            code's.
        archive_tokens: 0 keeps everything, as published. Any other number, not below the budget, is what the archive
            may hold: the oldest steps are dropped for new ones.
    """

    kind: ClassVar[str] = "rekv"
    positions: Positions = "compact"
    local_tokens: int = 15_000
    archive_tokens: int = 0

    def __post_init__(self) -> None:
        # Not super(): a dataclass with slots is another class than the one that this body belongs to.
        MemoryConfig.__post_init__(self)
        check_range("local_tokens", self.local_tokens, 1, None)
        check_range("archive_tokens", self.archive_tokens, 0, None)
        if 0 < self.archive_tokens < self.budget:
            raise ConfigError(
                f"archive_tokens: expected 0 or at least the budget of {self.budget}, got {self.archive_tokens}",
                hint="0 keeps everything",
            )

    @property
    def near_tokens(self) -> int:
        """W, tokens of the window that new steps attend to."""
        return min(self.local_tokens, self.budget)


@dataclass(frozen=True, slots=True, kw_only=True)
class DyCokeConfig(MemoryConfig):
    """DyCoke's temporal token merging in front of a sliding window of `budget` tokens.

    Attributes:
        merge_share: k, fraction of a step's visual tokens that is left out where the step is compared with an earlier
            one.
    """

    kind: ClassVar[str] = "dycoke"
    merge_share: float = 0.7

    def __post_init__(self) -> None:
        # Not super(): a dataclass with slots is another class than the one that this body belongs to.
        MemoryConfig.__post_init__(self)
        check_range("merge_share", self.merge_share, 0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DyCokeDecodeConfig(MemoryConfig):
    """DyCoke's pruning while an answer is decoded, over a full cache; the budget is the room it makes at first.

    Attributes:
        prune_share: p, fraction of the visual tokens that pruned layers leave out. 0.7 is the released README's; its
            code has 0.8.
        first_pruned_layer: l, index of the first layer that is pruned; the layer before it decides what is read.
        similarity: cosine of the attention to that of the decode step before, below which is chosen again.
    """

    kind: ClassVar[str] = "dycoke-decode"
    prune_share: float = 0.7
    first_pruned_layer: int = 3
    similarity: float = 0.9

    def __post_init__(self) -> None:
        # Not super(): a dataclass with slots is another class than the one that this body belongs to.
        MemoryConfig.__post_init__(self)
        check_range("prune_share", self.prune_share, 0, 1)
        check_range("first_pruned_layer", self.first_pruned_layer, 1, None)
        check_range("similarity", self.similarity, -1, 1)
