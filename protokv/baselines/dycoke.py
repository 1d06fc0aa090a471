"""`DyCoke`: temporal token merging in front of a sliding window. Query-agnostic and bounded.

Source: DyCoke (Tao et al., CVPR 2025), arXiv 2411.15024, its first mechanism, and the released code. The same: it works
on the features of a frame before the language model; frames come in groups of four; the first is whole, the second and
the third are compared with the first, the fourth with the whole third; of a compared frame the int((1 - k) T) tokens
are kept whose cosine to the same slot of the other frame is lowest.

What differs: it is streamed, so a frame is judged when it arrives, and at the end of the stream no group is special
(the source leaves the last group's third frame whole and drops an odd last frame). A frame is a step, one temporal
patch in Qwen-VL. Kept tokens stay in raster order and at the stream positions that they had; the source orders them by
similarity and packs them. One token is kept at least. In the source each second and fourth frame is cut by the
similarities of the pair before its own (an index off by one); here by its own. A step on another grid than its group's
starts a new group. What is behind it is ours: a window of the last `budget` tokens of those kept.

The other mechanism of DyCoke is `protokv.baselines.dycoke`.

`DyCokeDecode`: a full cache of which, while an answer is decoded, the deeper layers read only a part.

Source: DyCoke (Tao et al., CVPR 2025), arXiv 2411.15024, its second mechanism, and the released code: the
query-conditioned reference of the ProtoKV paper. The same: the question reads everything; at each later token, the
attention of layer l - 1 (mean over heads) over the visual tokens is compared with that of the token before, and where
their cosine is below 0.9, or there is none before, the int(n (1 - p)) tokens with the most attention are chosen; layers
l and deeper read the text and these. All keys and values are retained, at their positions.

What differs: while the cosine stays at 0.9 or above, the earlier choice goes on; the released code forgets it at every
token, so that it reads everything then. The heads' attentions are normalised over the prompt prefix and the visual
tokens, since a context does not see the question's own keys: heads that look mostly at the question have more weight in
the mean than in the source. Text that a family writes around a step (its time) counts as visual. A model of l layers or
fewer is not pruned.

Its bytes are NOT bounded: it is a full cache, and this only saves reading. Layers below l read everything at every
token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from protokv.baselines.exact import FullCache, SlidingWindow
from protokv.config import DyCokeConfig
from protokv.core.context import Context, Segment
from protokv.core.memory import MemoryShape
from protokv.core.rotary import Rotary, rotate
from protokv.core.tensors import Clock, StatePart, TensorSpec
from protokv.errors import StateCorrupt
from protokv.extras.compact import Anchoring, compacted, far_span, next_position_of, shift_of

GROUP = 4


class DyCoke(SlidingWindow):
    """A sliding window whose steps are thinned out before the model reads them."""

    def __init__(self, config: DyCokeConfig, shape: MemoryShape, rotary: Rotary) -> None:
        super().__init__(config, shape, rotary)
        self._group = FrameGroup(shape)

    @classmethod
    def declare(cls, config: Any, shape: MemoryShape) -> tuple[TensorSpec, ...]:
        """The window, and the features to compare with."""
        return (*super().declare(config, shape), *FrameGroup.declare(shape))

    def parts(self) -> Sequence[StatePart]:
        """Those of the window, and the group of frames."""
        return (*super().parts(), self._group)

    def select(self, features: Tensor, grid: tuple[int, int]) -> Tensor:
        """Of a compared step, the slots that changed most; of the first of a group, all."""
        compared = self._group.enter(features, grid)
        if compared is None:
            return torch.arange(features.shape[0], device=features.device)
        likeness = functional.cosine_similarity(compared.float(), features.float(), dim=1)
        n = max(1, int((1 - self._config.merge_share) * features.shape[0]))
        return likeness.argsort(stable=True)[:n].sort().values


class FrameGroup(StatePart):
    """The features of the step that the next one is compared with, `[V, E]`, and where in its group that stands.

    Empty until the first step, and of that step's size from then on.
    """

    promise: ClassVar[str] = "group of frames: its place and its grid are those of the features kept"

    def __init__(self, shape: MemoryShape) -> None:
        self._device = shape.device
        self._reference = torch.zeros((0, 0), dtype=shape.dtype, device=shape.device)
        self._grid = (0, 0)
        self._place = 0

    def enter(self, features: Tensor, grid: tuple[int, int]) -> Tensor | None:
        """Let a step in; the features to compare it with, None where it is the first of a group."""
        if grid != self._grid:
            self._place, self._grid = 0, grid
        compared = self._reference if self._place > 0 else None
        if self._place in (0, 2):
            self._reference = features.clone(memory_format=torch.contiguous_format)
        self._place = (self._place + 1) % GROUP
        return compared

    @staticmethod
    def declare(shape: MemoryShape) -> tuple[TensorSpec, ...]:
        """The features and the place; the same for all layers."""
        dims = ("visual_token", "embedding")
        return (
            TensorSpec(
                "merge.reference", dims, (None, None), shape.dtype, "features that the next step is compared with"
            ),
            TensorSpec("merge.group", ("field",), (3,), torch.int64, "place in the group, rows, columns"),
        )

    def held(self) -> dict[str, Tensor]:
        """The features, and (place in the group, rows, columns)."""
        return {"merge.reference": self._reference, "merge.group": torch.tensor([self._place, *self._grid])}

    def check(self, tensors: Mapping[str, Tensor], clock: Clock | None) -> None:
        """A place in a group, and a grid of as many cells as there are features."""
        features = len(tensors["merge.reference"])
        place, rows, columns = tensors["merge.group"].tolist()
        begun = features > 0
        if not 0 <= place < GROUP or rows < 0 or columns < 0 or rows * columns != features or (place and not begun):
            raise StateCorrupt(f"state: tensor merge.group holds {place}, {rows}, {columns} for {features} features")

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Take a checked state."""
        self._reference = tensors["merge.reference"].to(self._device, copy=True)
        self._place, *grid = tensors["merge.group"].tolist()
        self._grid = (grid[0], grid[1])


class DyCokeDecode(FullCache):
    """The full cache; what a question recalls prunes itself."""

    hides_recent = False
    undivided = "a layer of it looks at what another one did"

    def recall(self) -> Context:
        """Everything for the question, and a part of it for the answer. Each call is for one question."""
        return DecodePruning(
            self.context(),
            sink=self._slots.sink.stop,
            tokens=len(self._near),
            kept=self._kept(),
            first_layer=self._config.first_pruned_layer,
            similarity=self._config.similarity,
        )

    def report(self) -> dict[str, Any]:
        """Tokens held, and what a decode step reads of them below the first pruned layer and from there on."""
        held, layers = len(self._near), self._shape.layers
        pruned = max(0, layers - self._config.first_pruned_layer)
        decoding = {"whole_layers": layers - pruned, "pruned_layers": pruned, "tokens_whole": held}
        return super().report() | {"decode_step": decoding | {"tokens_pruned": self._kept()}}

    def _kept(self) -> int:
        return int(len(self._near) * (1 - self._config.prune_share))


@dataclass(slots=True)
class DecodePruning(Context):
    """A context whose deeper layers read a share of its tokens, from the second forward on.

    Attributes:
        whole: everything: the prompt prefix in slots `[0, sink)`, visual tokens in `[sink, sink + tokens)`.
        sink, tokens: how many these are.
        kept: visual tokens that pruned layers read.
        first_layer: the first pruned layer, at least 1.
        similarity: the cosine below which is chosen again.
    """

    whole: Context
    sink: int
    tokens: int
    kept: int
    first_layer: int
    similarity: float
    shift: int | Tensor = 0
    next_position: int | Tensor | None = None
    _forwards: int = field(default=0, init=False)
    _attention: Tensor | None = field(default=None, init=False)
    _chosen: Tensor | None = field(default=None, init=False)

    def at(self, layer: int, query: Tensor) -> tuple[Segment, ...]:
        """All slots, or in pruned layers after the question the prefix and the chosen ones."""
        whole = self.whole.at(layer, query)
        self._forwards += layer == 0
        if self._forwards < 2:
            return whole
        if layer == self.first_layer - 1:
            self._look(query, whole)
        if layer < self.first_layer or self._chosen is None:
            return whole
        # The visual tokens are in the last segment, behind what it has of the prefix.
        *prefix, last = whole
        rest = self.sink - sum(segment.keys.shape[1] for segment in prefix)
        slots = torch.cat((torch.arange(rest, device=query.device), rest + self._chosen))
        return *prefix, replace(last, keys=last.keys[:, slots], values=last.values[:, slots], bias=last.bias[:, slots])

    def visible_tokens(self) -> int:
        """Slots that the layers see which are not pruned."""
        return self.whole.visible_tokens()

    def far_span(self) -> int | Tensor:
        """As of the whole."""
        return far_span(self.whole)

    def compacted(self, anchoring: Anchoring, span: int | Tensor) -> DecodePruning:
        """The same with the whole re-anchored."""
        whole = compacted(self.whole, anchoring, span)
        return replace(self, whole=whole, shift=shift_of(whole), next_position=next_position_of(whole))

    def _look(self, query: Tensor, whole: Sequence[Segment]) -> None:
        """Choose again where the attention of the last query token has changed."""
        last, logits = query[:, -1:].float() * query.shape[-1] ** -0.5, []
        for segment in whole:
            asked = last if segment.query_rotation is None else rotate(last, *segment.query_rotation)
            folded = asked.reshape(segment.keys.shape[0], -1, query.shape[-1])
            logits.append(torch.baddbmm(segment.bias[:, None], folded, segment.keys.float().transpose(1, 2)))
        weights = torch.cat(logits, -1).softmax(-1).mean((0, 1))
        attention = weights[self.sink : self.sink + self.tokens]
        before, self._attention = self._attention, attention
        if before is None or float(functional.cosine_similarity(attention, before, dim=0)) < self.similarity:
            self._chosen = attention.argsort(descending=True, stable=True)[: self.kept].sort().values
