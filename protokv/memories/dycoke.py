"""DyCoke's two mechanisms: `DyCoke` thins out steps before the model reads them, `DyCokeDecode` prunes decoding.

Source: DyCoke (Tao et al., CVPR 2025), arXiv 2411.15024, and the released code.

`DyCoke`, temporal token merging in front of our sliding window: query-agnostic and bounded. The same: it works on the
features of a frame before the language model; frames come in groups of four; the first frame is whole, the second and
the third are compared with the first, the fourth with the whole third; of a compared frame, the int((1 - k) T) tokens
with the lowest cosine to the same slot of the other frame are kept. What differs:

- It streams: a frame is judged when it arrives. The source treats the last group of a video specially.
- A frame is a step, which is one temporal patch in Qwen-VL. A step on another grid starts a new group.
- Kept tokens stay in raster order at their stream positions; the source sorts them by similarity and packs them. At
  least one token is kept.
- The source cuts the second and fourth frames by the similarities of the pair before (an index off by one); here by
  their own.

`DyCokeDecode`, a full cache of which deeper layers read only a part while an answer is decoded: the query-conditioned
reference of the ProtoKV paper. The same: the question reads everything. At each later token, the attention of layer
l - 1 over the visual tokens (the mean over heads) is compared with the previous token's; if their cosine is below 0.9,
or there is no previous token, the int(n (1 - p)) tokens with the most attention are chosen. Layers l and deeper read
the text and the chosen tokens. All keys and values are kept at their positions. What differs:

- While the cosine stays at 0.9 or above, the last choice stays; the released code then reads everything.
- Attention is normalised over the prompt prefix and the visual tokens, because a context does not see the question's
  own keys: heads that look mostly at the question weigh more in the mean than in the source.
- Text that a family writes around a step (its time) counts as visual. A model of l layers or fewer is not pruned.

Its bytes are NOT bounded: it is a full cache and only saves reading.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from protokv.core.compact import Anchoring, compact_context, far_span, find_next_position, find_shift
from protokv.core.context import Context, Segment
from protokv.core.rotary import Rotary, rotate
from protokv.core.settings import MemoryConfig
from protokv.core.tensors import MemoryShape, StatePart, TensorSpec
from protokv.memories.exact import TokensConfig
from protokv.memories.full import FullCache
from protokv.memories.window import SlidingWindow

FRAMES_PER_GROUP = 4  # frames

# Tokens are chosen again if the cosine between the attention of two decode steps is lower.
SIMILARITY = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class DyCokeConfig(TokensConfig):
    """DyCoke's temporal token merging in front of a sliding window of `budget` tokens.

    Attributes:
        merge_share: k, fraction of the visual tokens that is dropped from a step compared with an earlier one.
    """

    name: ClassVar[str] = "dycoke"
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {"merge_share": (0, 1)}

    merge_share: float = 0.7


class DyCoke(SlidingWindow):
    """A sliding window whose steps are thinned out before the model reads them."""

    def __init__(self, config: DyCokeConfig, shape: MemoryShape, rotary: Rotary) -> None:
        super().__init__(config, shape, rotary)
        self._group = FrameGroup(shape)

    @classmethod
    def declare(cls, config: Any, shape: MemoryShape) -> tuple[TensorSpec, ...]:
        """Declare the window and the features to compare with."""
        return (*super().declare(config, shape), *FrameGroup.declare(shape))

    def parts(self) -> Sequence[StatePart]:
        """Return the parts of the window, and the group of frames."""
        return (*super().parts(), self._group)

    def select(self, features: Tensor, grid: tuple[int, int]) -> Tensor:
        """Return the slots that changed most; all slots of the first step of a group."""
        compared = self._group.enter(features, grid)
        if compared is None:
            return torch.arange(features.shape[0], device=features.device)
        similarity = functional.cosine_similarity(compared.float(), features.float(), dim=1)
        n = max(1, int((1 - self._config.merge_share) * features.shape[0]))
        return similarity.argsort(stable=True)[:n].sort().values


class FrameGroup(StatePart):
    """The features `[V, E]` that the next step is compared with, and the index of the next step in its group.

    The features are empty until the first step.
    """

    def __init__(self, shape: MemoryShape) -> None:
        self._device = shape.device
        self._reference = torch.zeros((0, 0), dtype=shape.dtype, device=shape.device)
        self._grid = (0, 0)
        self._index = 0

    def enter(self, features: Tensor, grid: tuple[int, int]) -> Tensor | None:
        """Take a step; return the features to compare it with, None for the first of a group."""
        if grid != self._grid:
            self._index, self._grid = 0, grid
        compared = self._reference if self._index > 0 else None
        if self._index in (0, 2):
            self._reference = features.clone(memory_format=torch.contiguous_format)
        self._index = (self._index + 1) % FRAMES_PER_GROUP
        return compared

    @staticmethod
    def declare(shape: MemoryShape) -> tuple[TensorSpec, ...]:
        """Declare the features and the index; the same for all layers."""
        dims, meaning = ("visual_token", "embedding"), "features that the next step is compared with"
        return (
            TensorSpec("merge.reference", dims, (None, None), shape.dtype, meaning),
            TensorSpec("merge.group", ("field",), (3,), torch.int64, "index in the group, rows, columns"),
        )

    def live_tensors(self) -> dict[str, Tensor]:
        """Return the features, and (index in the group, rows, columns)."""
        return {"merge.reference": self._reference, "merge.group": torch.tensor([self._index, *self._grid])}

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Take a checked state."""
        self._reference = tensors["merge.reference"].to(self._device, copy=True)
        self._index, *grid = tensors["merge.group"].tolist()
        self._grid = (grid[0], grid[1])


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


class DyCokeDecode(FullCache):
    """A full cache whose recalled context prunes itself."""

    hides_recent = False
    undivided = "deeper layers read what the attention of another layer chose"

    def recall(self) -> Context:
        """Return everything for the question and a part for its answer. Each call is for one question."""
        return DecodePruning(
            self.context(),
            sink=self._slots.sink.stop,
            tokens=len(self._near),
            kept=self._kept(),
            first_layer=self._config.first_pruned_layer,
        )

    def _kept(self) -> int:
        return int(len(self._near) * (1 - self._config.prune_share))


@dataclass(slots=True)
class DecodePruning(Context):
    """A context whose deeper layers read a share of its tokens from the second forward on.

    Attributes:
        whole: everything: the prompt prefix in slots `[0, sink)`, visual tokens in `[sink, sink + tokens)`.
        sink, tokens: the number of these.
        kept: the number of visual tokens that pruned layers read.
        first_layer: the first pruned layer, at least 1.
    """

    whole: Context
    sink: int
    tokens: int
    kept: int
    first_layer: int
    shift: int | Tensor = 0
    next_position: int | Tensor | None = None
    _forwards: int = field(default=0, init=False)
    _attention: Tensor | None = field(default=None, init=False)
    _chosen: Tensor | None = field(default=None, init=False)

    def at(self, layer: int, query: Tensor) -> tuple[Segment, ...]:
        """Return all slots; in pruned layers, after the question, the prefix and the chosen slots."""
        whole = self.whole.at(layer, query)
        self._forwards += layer == 0
        if self._forwards < 2:
            return whole
        if layer == self.first_layer - 1:
            self._choose(query, whole)
        if layer < self.first_layer or self._chosen is None:
            return whole
        # The visual tokens are in the last segment, after its part of the prefix.
        *prefix, last = whole
        rest = self.sink - sum(segment.keys.shape[1] for segment in prefix)
        slots = torch.cat((torch.arange(rest, device=query.device), rest + self._chosen))
        return *prefix, replace(last, keys=last.keys[:, slots], values=last.values[:, slots], bias=last.bias[:, slots])

    def visible_tokens(self) -> int:
        """Return the number of slots that unpruned layers see."""
        return self.whole.visible_tokens()

    def far_span(self) -> int | Tensor:
        """Return the far span of the whole."""
        return far_span(self.whole)

    def compact(self, anchoring: Anchoring, span: int | Tensor) -> DecodePruning:
        """Return the same context with the whole re-anchored."""
        whole = compact_context(self.whole, anchoring, span)
        return replace(self, whole=whole, shift=find_shift(whole), next_position=find_next_position(whole))

    def _choose(self, query: Tensor, whole: Sequence[Segment]) -> None:
        """Choose tokens again if the attention of the last query token has changed."""
        last = query[:, -1:].float() * query.shape[-1] ** -0.5
        logits = []
        for segment in whole:
            rotated = last if segment.query_rotation is None else rotate(last, *segment.query_rotation)
            folded = rotated.reshape(segment.keys.shape[0], -1, query.shape[-1])
            keys = segment.keys[..., : query.shape[-1]].float()
            logits.append(torch.baddbmm(segment.bias[:, None], folded, keys.transpose(1, 2)))
        weights = torch.cat(logits, -1).softmax(-1).mean((0, 1))
        attention = weights[self.sink : self.sink + self.tokens]
        before, self._attention = self._attention, attention
        if before is None or float(functional.cosine_similarity(attention, before, dim=0)) < SIMILARITY:
            self._chosen = attention.argsort(descending=True, stable=True)[: self.kept].sort().values


DyCokeConfig.memory = DyCoke
DyCokeDecodeConfig.memory = DyCokeDecode
