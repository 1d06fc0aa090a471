"""`KVSlots`: the slots that attention reads, `[prompt prefix | far | near]`.

`SlotRows` of the device room lays them out. On CUDA in half precision the bias of a slot stands
behind the features of its key, too, where the kernel adds it to the logits: the `wide` form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from protokv.core.context import SlotContext
from protokv.core.tensors import MemoryShape, Specs, StateTensors, TensorDict, TensorGroups, Tensors
from protokv.device.slots import SlotRows


class KVSlots(SlotRows, StateTensors):
    """Keys and values `[L, H, P0 + far + near, D]` with a logit bias a slot, all free at first but
    for the prefix.
    """

    def __init__(self, shape: MemoryShape, *, far: int, near: int) -> None:
        P0 = shape.sink_tokens
        N = P0 + far + near
        size = (shape.layers, shape.kv_heads, N, shape.head_size)
        super().__init__(size, shape.dtype, shape.device)
        self.sink = slice(0, P0)
        self.far = slice(P0, P0 + far)
        self.near = slice(P0 + far, N)
        self.started = False

    def start(self, keys: Tensor, values: Tensor) -> None:
        """Take the prompt prefix, `[L, H, P0, D]` each. RuntimeError: the stream has started
        already.
        """
        if self.started:
            raise RuntimeError("the memory has its prompt prefix already")
        self.keys[:, :, self.sink] = keys
        self.values[:, :, self.sink] = values
        self.bias[:, :, self.sink] = 0.0
        self.started = True

    def write_far(self, slots: Tensor, of_head: int, given: Sequence[Tensor]) -> None:
        """Write keys, and values if they are given, `[n, D]` float32, into far slots `[n]` int64.

        Far slots are numbered head after head, `of_head` in each. `find_rows` finds them among the
        slots of all heads, which lie one head behind the other.
        """
        self.write_rows(self.far.start, self.find_rows(slots, of_head), given)

    def context(
        self, near: Tensor, far: Callable[[], Tensor] | None = None, used: int | None = None
    ) -> SlotContext:
        """Return all slots, given stream positions: `near` `[near, P]` int64, and what returns `[L,
        H, far, P]`.

        Only the first `used` far slots may hold anything; None: all.
        """

        def positions() -> Tensor:
            L, H = self.keys.shape[:2]
            P0 = self.sink.stop
            P = near.shape[1]
            line = torch.arange(P0, device=near.device)[:, None].expand(P0, P)
            parts = [line.expand(L, H, P0, P), near.expand(L, H, *near.shape)]
            return torch.cat(parts if far is None else [parts[0], far(), parts[1]], 2)

        end = self.far.stop if used is None else self.far.start + used
        parts = (
            (slice(None),) if end == self.far.stop else (slice(0, end), slice(self.far.stop, None))
        )
        # Keys and values with the bias as it is now; None where attention reads them as they are.
        wide = self.read()
        return SlotContext(
            self.keys, self.values, self.bias, self.far, positions, parts=parts, wide=wide
        )

    @staticmethod
    def declare(shape: MemoryShape) -> Specs:
        """Declare the prompt prefix."""
        declare = shape.axes(sink_token=shape.sink_tokens).declare
        dims = "layer kv_head sink_token feature"
        return (
            declare("sink.keys", dims, shape.dtype, "keys of the prompt prefix, rotated"),
            declare("sink.values", dims, shape.dtype, "values of the prompt prefix"),
        )

    def live_tensors(self) -> TensorDict:
        """Return the prompt prefix."""
        return {
            "sink.keys": self.keys[:, :, self.sink],
            "sink.values": self.values[:, :, self.sink],
        }

    def take(self, tensors: Tensors) -> None:
        """Take the prompt prefix of a checked state."""
        self.started = False
        self.start(tensors["sink.keys"], tensors["sink.values"])

    def buffers(self) -> TensorGroups:
        """Return the bias of the prompt prefix, and what the `wide` form takes beside the slots."""
        beside = self.beside()
        return {"sink": (self.bias[:, :, self.sink],)} | ({"columns": beside} if beside else {})
