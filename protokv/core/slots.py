"""The slots that attention reads: one buffer `[sink P0 | far | near]` with a logit bias a slot.

Owns the allocation, the prompt prefix (sink) and nothing else: who fills the far and the near part holds a
view of it. The shape is fixed when it is made. Free slots hold finite numbers and have the bias `-inf`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from protokv.core.context import SlotContext
from protokv.core.memory import MemoryShape, StepKV
from protokv.core.tensors import LAYER, StatePart, TensorSpec


class Slots(StatePart):
    """`[L, H, P0 + far + near, D]` keys and values and their bias, all free at first."""

    def __init__(self, shape: MemoryShape, *, far: int, near: int) -> None:
        P0 = shape.sink_tokens
        size = (shape.layers, shape.kv_heads, P0 + far + near, shape.head_size)
        self.keys = torch.zeros(size, dtype=shape.dtype, device=shape.device)
        self.values = torch.zeros(size, dtype=shape.dtype, device=shape.device)
        self.bias = torch.full(size[:3], -torch.inf, device=shape.device)
        self.sink, self.far, self.near = slice(0, P0), slice(P0, P0 + far), slice(P0 + far, P0 + far + near)
        self.started = False

    def start(self, keys: Tensor, values: Tensor) -> None:
        """Take the prompt prefix, `[L, H, P0, D]` each.

        Raises:
            ValueError: it has another shape or dtype.
            RuntimeError: the stream has started already.
        """
        if self.started:
            raise RuntimeError("the memory has its prompt prefix already")
        held = self.keys[:, :, self.sink]
        for name, given in (("keys", keys), ("values", values)):
            if given.shape != held.shape or given.dtype != held.dtype:
                raise ValueError(
                    f"prompt prefix: {name} must be {list(held.shape)} {held.dtype}, "
                    f"got {list(given.shape)} {given.dtype}"
                )
        self.keys[:, :, self.sink] = keys
        self.values[:, :, self.sink] = values
        self.bias[:, :, self.sink] = 0.0
        self.started = True

    def check_step(self, step: StepKV, shape: MemoryShape, last_step: int) -> None:
        """Refuse a step that does not fit the memory or the order of the stream.

        Raises:
            ValueError: its tensors do not fit, or its index is not above the last one.
            RuntimeError: the stream has not started.
        """
        if not self.started:
            raise RuntimeError("the memory needs its prompt prefix before the first step: call start()")
        step.check(shape)
        if step.step <= last_step:
            raise ValueError(f"step {step.step} came after step {last_step}; indices must increase from 0")

    def context(self, near: Tensor, far: Callable[[], Tensor] | None = None) -> SlotContext:
        """All slots.

        Args:
            near: stream positions `[near, P]` int64 of the near part.
            far: gives those of the far part, `[L, H, far, P]` int64; None where it has no slots.
        """

        def positions() -> Tensor:
            L, H = self.keys.shape[:2]
            P0, P = self.sink.stop, near.shape[1]
            line = torch.arange(P0, device=near.device)[:, None].expand(P0, P)
            parts = [line.expand(L, H, P0, P), near.expand(L, H, *near.shape)]
            return torch.cat(parts if far is None else [parts[0], far(), parts[1]], 2)

        return SlotContext(self.keys, self.values, self.bias, self.far, positions)

    @staticmethod
    def declare(shape: MemoryShape) -> tuple[TensorSpec, ...]:
        """The prompt prefix."""
        dims = (LAYER, "kv_head", "sink_token", "feature")
        size = (shape.layers, shape.kv_heads, shape.sink_tokens, shape.head_size)
        return (
            TensorSpec("sink.keys", dims, size, shape.dtype, "keys of the prompt prefix, rotated"),
            TensorSpec("sink.values", dims, size, shape.dtype, "values of the prompt prefix"),
        )

    def held(self) -> dict[str, Tensor]:
        """The prompt prefix."""
        return {"sink.keys": self.keys[:, :, self.sink], "sink.values": self.values[:, :, self.sink]}

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the prompt prefix of a checked state."""
        self.started = False
        self.start(tensors["sink.keys"], tensors["sink.values"])

    def buffers(self) -> Mapping[str, Sequence[Tensor]]:
        """The bias of the prompt prefix."""
        return {"sink": (self.bias[:, :, self.sink],)}
