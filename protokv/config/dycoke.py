"""Settings of the two mechanisms of DyCoke (arXiv 2411.15024)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from protokv.config.base import MemoryConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DyCokeConfig(MemoryConfig):
    """DyCoke's temporal token merging in front of a sliding window of `budget` tokens.

    Attributes:
        merge_share: k, fraction of a step's visual tokens that is left out where the step is compared with an earlier
            one.
    """

    name: ClassVar[str] = "dycoke"
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {"merge_share": (0, 1)}

    merge_share: float = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class DyCokeDecodeConfig(MemoryConfig):
    """DyCoke's pruning while an answer is decoded, over a full cache; the budget is the room it makes at first.

    Attributes:
        prune_share: p, fraction of the visual tokens that pruned layers leave out. 0.7 is the released README's; its
            code has 0.8.
        first_pruned_layer: l, index of the first layer that is pruned; the layer before it decides what is read.
        similarity: cosine of the attention to that of the decode step before, below which is chosen again.
    """

    name: ClassVar[str] = "dycoke-decode"
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {
        "prune_share": (0, 1),
        "first_pruned_layer": (1, 10_000),
        "similarity": (-1, 1),
    }

    prune_share: float = 0.7
    first_pruned_layer: int = 3
    similarity: float = 0.9
