"""`DyCoke`: a sliding window behind temporal token merging, which thins out steps before the model
reads them.

Source: DyCoke (Tao et al., CVPR 2025), arXiv 2411.15024, and the released code. The same: it works
on the features of a frame before the language model; frames come in groups of four; the first frame
is whole, the second and the third are compared with the first, the fourth with the whole third; of
a compared frame, the int((1 - k) T) tokens with the lowest cosine to the same slot of the other
frame are kept. What differs:

- It streams: a frame, here a step, is judged when it arrives. A step on another grid starts a new
  group.
- Kept tokens, at least one, stay in raster order at their stream positions; the source sorts and
  packs them.
- The source cuts the second and fourth frames by the similarities of the pair before (an index off
  by one).
- Pruning while an answer is decoded is left out: it needs a full cache and bounds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from protokv.core.rotary import Rotary
from protokv.core.settings import MemoryConfig, ShareSetting
from protokv.core.step import Grid
from protokv.core.tensors import MemoryShape, Specs, StateTensors, TensorDict, Tensors
from protokv.memories.window import SlidingWindow

_FRAMES_PER_GROUP = 4  # frames


@dataclass(frozen=True, slots=True, kw_only=True)
class DyCokeConfig(MemoryConfig):
    """DyCoke's temporal token merging in front of a sliding window of `budget` tokens.

    Attributes:
        merge_share: k, fraction of the visual tokens that is dropped from a step compared with an
            earlier one.
    """

    name: ClassVar[str] = "dycoke"

    merge_share: ShareSetting = 0.7


class DyCoke(SlidingWindow[DyCokeConfig]):
    """A sliding window whose steps are thinned out before the model reads them."""

    def __init__(self, config: DyCokeConfig, shape: MemoryShape, rotary: Rotary) -> None:
        super().__init__(config, shape, rotary)
        self._group = _FrameGroup(shape)

    @classmethod
    def declare(cls, config: DyCokeConfig, shape: MemoryShape) -> Specs:
        """Declare the window and the features to compare with."""
        return (*super().declare(config, shape), *_FrameGroup.declare(shape))

    def parts(self) -> Sequence[StateTensors]:
        """Return the parts of the window, and the group of frames."""
        return (*super().parts(), self._group)

    def select(self, features: Tensor, grid: Grid) -> Tensor:
        """Return the slots that changed most; all slots of the first step of a group."""
        compared = self._group.enter(features, grid)
        if compared is None:
            return torch.arange(features.shape[0], device=features.device)
        similarity = functional.cosine_similarity(compared.float(), features.float(), dim=1)
        n = max(1, int((1 - self._config.merge_share) * features.shape[0]))
        return similarity.argsort(stable=True)[:n].sort().values


class _FrameGroup(StateTensors):
    """The features `[V, E]` that the next step is compared with, none at first, and its index in
    its group.
    """

    def __init__(self, shape: MemoryShape) -> None:
        self._device = shape.device
        self._reference = torch.zeros((0, 0), dtype=shape.dtype, device=shape.device)
        self._grid = (0, 0)
        self._index = 0

    def enter(self, features: Tensor, grid: Grid) -> Tensor | None:
        """Take a step; return the features to compare it with, None for the first of a group."""
        if grid != self._grid:
            self._index = 0
            self._grid = grid
        compared = self._reference if self._index > 0 else None
        if self._index in (0, 2):
            self._reference = features.clone(memory_format=torch.contiguous_format)
        self._index = (self._index + 1) % _FRAMES_PER_GROUP
        return compared

    @staticmethod
    def declare(shape: MemoryShape) -> Specs:
        """Declare the features and the index; the same for all layers."""
        declare = shape.axes(visual_token=None, embedding=None, field=3).declare
        features = "features that the next step is compared with"
        group = "index in the group, rows, columns"
        return (
            declare("merge.reference", "visual_token embedding", shape.dtype, features),
            declare("merge.group", "field", torch.int64, group),
        )

    def live_tensors(self) -> TensorDict:
        """Return the features, and (index in the group, rows, columns)."""
        return {
            "merge.reference": self._reference,
            "merge.group": torch.tensor([self._index, *self._grid]),
        }

    def take(self, tensors: Tensors) -> None:
        """Take a checked state."""
        self._reference = tensors["merge.reference"].to(self._device, copy=True)
        self._index, *grid = tensors["merge.group"].tolist()
        self._grid = (grid[0], grid[1])


DyCokeConfig.memory = DyCoke
