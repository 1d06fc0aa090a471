"""`DyCoke`: temporal token merging in front of a sliding window. Query-agnostic and bounded.

Source: DyCoke (Tao et al., CVPR 2025), its first mechanism, and the released code. The same: it works on the features
of a frame before the language model; frames come in groups of four; the first is whole, the second and the third are
compared with the first, the fourth with the whole third; of a compared frame the int((1 - k) T) tokens are kept whose
cosine to the same slot of the other frame is lowest.

What differs: it is streamed, so a frame is judged when it arrives, and at the end of the stream no group is special
(the source leaves the last group's third frame whole and drops an odd last frame). A frame is a step, one temporal
patch in Qwen-VL. Kept tokens stay in raster order and at the stream positions that they had; the source orders them by
similarity and packs them. One token is kept at least. In the source each second and fourth frame is cut by the
similarities of the pair before its own (an index off by one); here by its own. A step on another grid than its group's
starts a new group. What is behind it is ours: a window of the last `budget` tokens of those kept.

The other mechanism of DyCoke is `protokv.memory.dycoke_decode`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from protokv.config import DyCokeConfig
from protokv.errors import StateCorrupt
from protokv.memory.base import MemoryShape, require, size_of
from protokv.memory.sliding_window import SlidingWindow
from protokv.rotary import Rotary

GROUP = 4


class DyCoke(SlidingWindow):
    """A sliding window whose steps are thinned out before the model reads them.

    Beside the window its state is the features of one step, `[V, E]`: the one that the next step is compared with. It
    is empty until the first step, and of that step's size from then on.
    """

    layer_axis: ClassVar[Mapping[str, int | None]] = {
        **SlidingWindow.layer_axis,
        "merge.reference": None,
        "merge.group": None,
    }

    def __init__(self, config: DyCokeConfig, shape: MemoryShape, rotary: Rotary) -> None:
        super().__init__(config, shape, rotary)
        self._config = config
        self._reference = torch.zeros((0, 0), dtype=shape.dtype, device=shape.device)
        self._grid = (0, 0)
        self._place = 0

    def select(self, features: Tensor, grid: tuple[int, int]) -> Tensor:
        """Of a compared step, the slots that changed most; of the first of a group, all."""
        if grid != self._grid:
            self._place, self._grid = 0, grid
        kept = torch.arange(features.shape[0], device=features.device)
        if self._place > 0:
            likeness = functional.cosine_similarity(self._reference.float(), features.float(), dim=1)
            n = max(1, int((1 - self._config.merge_share) * features.shape[0]))
            kept = likeness.argsort(stable=True)[:n].sort().values
        if self._place in (0, 2):
            self._reference = features.clone(memory_format=torch.contiguous_format)
        self._place = (self._place + 1) % GROUP
        return kept

    def tensors(self) -> dict[str, Tensor]:
        """The window's state, the features to compare with, and (place in the group, rows, columns)."""
        group = torch.tensor([self._place, *self._grid])
        return super().tensors() | {"merge.reference": self._reference, "merge.group": group}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take a state that `tensors` gave."""
        reference = tensors.get("merge.reference", self._reference)
        size = (reference.shape[0], reference.shape[1]) if reference.ndim == 2 else (0, 0)
        merging = {"merge.reference": (size, self._shape.dtype), "merge.group": ((3,), torch.int64)}
        require(tensors, {**self._slots.spec(), **self._near.spec(), **merging})
        place, rows, columns = tensors["merge.group"].tolist()
        begun = size[0] > 0
        if not 0 <= place < GROUP or rows < 0 or columns < 0 or rows * columns != size[0] or (place and not begun):
            raise StateCorrupt(f"state: tensor merge.group holds {place}, {rows}, {columns} for {size[0]} features")
        super().load({name: tensor for name, tensor in tensors.items() if name not in merging})
        self._reference = tensors["merge.reference"].to(self._shape.device, copy=True)
        self._grid, self._place = (rows, columns), place

    def nbytes(self) -> dict[str, int]:
        """Bytes by part; `merge` is 0 until the first step has been seen."""
        return super().nbytes() | {"merge": size_of(self._reference)}
