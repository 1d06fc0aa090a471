"""`KeptTokens`: slots `[far | near | free]` of exact tokens, each with its place, and which of them are in use.

Far are tokens that each head chose for itself, near is whole steps, the same in all heads; both are in stream order.
The border moves, the shape does not. Owns the slots of the budget and what is saved of them; who chooses is not its
business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from protokv.errors import StateCorrupt
from protokv.memory.base import MemoryShape, StepKV
from protokv.memory.slots import Slots
from protokv.memory.state import LAYER, Clock, StatePart, TensorSpec


class KeptTokens(StatePart):
    """M slots for each layer and head.

    Attributes:
        keys, values: `[L, H, M, D]` model dtype, views of the context's slots.
        positions: `[L, H, M, P]` int64.
        coordinates: `[L, H, M, 2]` float32.
        step: `[L, H, M]` int64, -1 where a slot is free.
        far: tokens that the heads chose for themselves.
        lengths: tokens of each near step, oldest first. Mirrors `step`, so that a step asks nothing of the device.
        last_step: index of the newest step; -1 before the first.
    """

    promise: ClassVar[str] = "kept tokens: in the order of the stream, their newest steps the same in all heads"

    def __init__(self, slots: Slots, shape: MemoryShape) -> None:
        held = slots.far
        self.keys, self.values = slots.keys[:, :, held], slots.values[:, :, held]
        self._bias = slots.bias[:, :, held]
        L, H, M = self._bias.shape
        self.positions = torch.zeros(L, H, M, shape.position_components, dtype=torch.int64, device=shape.device)
        self.coordinates = torch.zeros(L, H, M, 2, device=shape.device)
        self.step = torch.full((L, H, M), -1, device=shape.device)
        self.far = 0
        self.lengths: list[int] = []
        self.last_step = -1

    def __len__(self) -> int:
        return self.far + sum(self.lengths)

    def append(self, step: StepKV) -> None:
        """Take the last tokens of a step into free slots; of a step larger than M the last M."""
        T = min(step.positions.shape[0], self.step.shape[2])
        slots = slice(len(self), len(self) + T)
        self.keys[:, :, slots] = step.keys[:, :, -T:]
        self.values[:, :, slots] = step.values[:, :, -T:]
        self.positions[:, :, slots] = step.positions[-T:]
        self.coordinates[:, :, slots] = step.coordinates[-T:]
        self.step[:, :, slots] = step.step
        self._bias[:, :, slots] = 0.0
        self.lengths.append(T)
        self.last_step = step.step

    def cut(self, keep: int, recent: list[int]) -> None:
        """Free all slots behind the first `keep`, of which the last are near steps of these lengths."""
        self.step[:, :, keep:] = -1
        self._bias[:, :, keep:] = -torch.inf
        self.far, self.lengths = keep - sum(recent), recent

    @staticmethod
    def declare(shape: MemoryShape, tokens: int) -> tuple[TensorSpec, ...]:
        """M slots."""
        L, H, M, D, P = shape.layers, shape.kv_heads, tokens, shape.head_size, shape.position_components
        slot = (LAYER, "kv_head", "kept_token")
        return (
            TensorSpec("kept.keys", (*slot, "feature"), (L, H, M, D), shape.dtype, "keys of kept tokens, rotated"),
            TensorSpec("kept.values", (*slot, "feature"), (L, H, M, D), shape.dtype, "values of kept tokens"),
            TensorSpec(
                "kept.positions", (*slot, "component"), (L, H, M, P), torch.int64, "their stream positions", "position"
            ),
            TensorSpec(
                "kept.coordinates", (*slot, "xy"), (L, H, M, 2), torch.float32, "their cells", "share of the image"
            ),
            TensorSpec("kept.step", slot, (L, H, M), torch.int64, "their steps; -1: a free slot", "step", fill=-1),
            TensorSpec("kept.count", ("field",), (3,), torch.int64, "far tokens, near tokens, last step seen"),
        )

    def held(self) -> dict[str, Tensor]:
        """What is saved of the slots, in place."""
        return {
            "kept.keys": self.keys,
            "kept.values": self.values,
            "kept.positions": self.positions,
            "kept.coordinates": self.coordinates,
            "kept.step": self.step,
            "kept.count": torch.tensor([self.far, sum(self.lengths), self.last_step]),
        }

    def buffers(self) -> Mapping[str, Sequence[Tensor]]:
        """The bias of the slots."""
        return {"kept": (self._bias,)}

    def check(self, tensors: Mapping[str, Tensor], clock: Clock | None) -> None:
        """Counts that fit the slots, and steps in order."""
        steps = tensors["kept.step"]
        M = steps.shape[2]
        far, near, last_step = tensors["kept.count"].tolist()
        if min(far, near) < 0 or far + near > M or (near > 0) != (last_step >= 0) or near == 0 < far:
            raise StateCorrupt(f"state: tensor kept.count holds {far}, {near}, {last_step}, which no stream leaves")
        chosen, whole, free = steps[:, :, :far], steps[:, :, far : far + near], steps[:, :, far + near :]
        held = steps[:, :, : far + near]
        in_order = (held >= 0).all() & (held.diff(dim=2) >= 0).all() & (chosen[..., -1:] < whole[..., :1]).all()
        shared = (whole == whole[:1, :1]).all() & (whole[..., -1:] == last_step).all()
        if not (in_order & shared & (free == -1).all()):
            raise StateCorrupt("state: tensor kept.step does not agree with kept.count")
        if clock is not None and last_step >= clock.steps:
            raise StateCorrupt(f"state: tensor kept.count ends at step {last_step}, the clock at {clock.steps - 1}")

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Take a checked state."""
        for held, name in (
            (self.keys, "keys"),
            (self.values, "values"),
            (self.positions, "positions"),
            (self.coordinates, "coordinates"),
            (self.step, "step"),
        ):
            held.copy_(tensors[f"kept.{name}"])
        self._bias.fill_(0.0).masked_fill_(self.step < 0, -torch.inf)
        self.far, near, self.last_step = tensors["kept.count"].tolist()
        whole = self.step[0, 0, self.far : self.far + near]
        self.lengths = torch.unique_consecutive(whole, return_counts=True)[1].tolist()
