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

The other mechanism of DyCoke is `protokv.memory.dycoke_decode`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from protokv.config import DyCokeConfig
from protokv.errors import StateCorrupt
from protokv.memory.base import MemoryShape
from protokv.memory.sliding_window import SlidingWindow
from protokv.memory.state import Clock, StatePart, TensorSpec
from protokv.rotary import Rotary

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
