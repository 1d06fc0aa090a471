"""Three rules that are not in the package, each written with `ScoredMemory` alone."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import max_pool1d

from protokv.memories import HeldTokens, KVCompressionConfig, ScoredMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapKVConfig(KVCompressionConfig):
    """SnapKV (arXiv 2404.14469): what the queries of the newest step look at, and its
    neighbours.
    """

    name: ClassVar[str] = "snapkv"

    pooling: int = 5


class SnapKV(ScoredMemory[SnapKVConfig]):
    reads_queries = True

    def score(self, held: HeldTokens) -> Tensor:
        assert held.queries is not None
        H, N, D = held.keys.shape
        queries = held.queries.view(H, -1, D)
        weights = (queries @ held.keys.mT / D**0.5).softmax(-1).sum(1)
        width = self._config.pooling
        pooled: Tensor = max_pool1d(weights[:, None], width, stride=1, padding=width // 2)
        return pooled[:, 0, :N]


SnapKVConfig.memory = SnapKV


@dataclass(frozen=True, slots=True, kw_only=True)
class H2OConfig(KVCompressionConfig):
    """H2O (arXiv 2306.14048): heavy hitters, by the attention that they have got so far."""

    name: ClassVar[str] = "h2o"


class H2O(ScoredMemory[H2OConfig]):
    reads_queries = True

    def score(self, held: HeldTokens) -> Tensor:
        assert held.attention is not None
        return held.attention.clone()


H2OConfig.memory = H2O


@dataclass(frozen=True, slots=True, kw_only=True)
class LongestConfig(KVCompressionConfig):
    """Keeps the tokens whose values are longest."""

    name: ClassVar[str] = "longest-values"


class Longest(ScoredMemory):
    def score(self, held: HeldTokens) -> Tensor:
        norms: Tensor = held.values.norm(dim=-1)
        return norms


LongestConfig.memory = Longest
