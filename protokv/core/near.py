"""The near window: the most recent steps, exact, in slots that attention reads in place.

`NearWindow` is a ring of W tokens in the near part of `Slots`. Whole steps leave it, oldest first, when it would exceed
W; of a step larger than W the last W tokens stay. Invariant: the tokens held are ring positions `start .. start +
count`, in stream order; their bias is 0, or `-inf` for tokens dropped as not finite, and `-inf` in free slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from protokv.core import kernels
from protokv.core.context import SlotContext
from protokv.core.step import StepKV
from protokv.core.tensors import LAYER, MemoryShape, StatePart, TensorSpec
from protokv.errors import StateCorrupt

# The parts of tokens, and the axis of each that counts them.
_AXES: Final = {"keys": 2, "values": 2, "positions": 0, "coordinates": 0, "usable": 0}


class Slots(StatePart):
    """Keys and values `[L, H, P0 + far + near, D]` with a logit bias a slot, all free at first but for the prefix."""

    def __init__(self, shape: MemoryShape, *, far: int, near: int) -> None:
        P0, D = shape.sink_tokens, shape.head_size
        columns = kernels.COLUMNS * kernels.takes_columns(D, shape.dtype, shape.device)
        size = (shape.layers, shape.kv_heads, P0 + far + near, D + columns)
        keys, values = (torch.zeros(size, dtype=shape.dtype, device=shape.device) for _ in range(2))
        self.keys, self.values = keys[..., :D], values[..., :D]
        # As attention reads them, with the columns of the bias.
        self._rows = (keys, values) if columns else None
        self.bias = torch.full(size[:3], -torch.inf, device=shape.device)
        self.sink, self.far, self.near = slice(0, P0), slice(P0, P0 + far), slice(P0 + far, P0 + far + near)
        self.started = False

    def start(self, keys: Tensor, values: Tensor) -> None:
        """Take the prompt prefix, `[L, H, P0, D]` each. RuntimeError: the stream has started already."""
        if self.started:
            raise RuntimeError("the memory has its prompt prefix already")
        self.keys[:, :, self.sink] = keys
        self.values[:, :, self.sink] = values
        self.bias[:, :, self.sink] = 0.0
        self.started = True

    def context(self, near: Tensor, far: Callable[[], Tensor] | None = None) -> SlotContext:
        """Return all slots, given stream positions: `near` `[near, P]` int64, and what returns `[L, H, far, P]`."""

        def positions() -> Tensor:
            L, H = self.keys.shape[:2]
            P0, P = self.sink.stop, near.shape[1]
            line = torch.arange(P0, device=near.device)[:, None].expand(P0, P)
            parts = [line.expand(L, H, P0, P), near.expand(L, H, *near.shape)]
            return torch.cat(parts if far is None else [parts[0], far(), parts[1]], 2)

        if self._rows:
            D = self.keys.shape[-1]
            self._rows[0][..., D:] = kernels.bias_columns(self.bias, D**-0.5, self.keys.dtype)
        return SlotContext(self.keys, self.values, self.bias, self.far, positions, rows=self._rows)

    @staticmethod
    def declare(shape: MemoryShape) -> tuple[TensorSpec, ...]:
        """Declare the prompt prefix."""
        dims = (LAYER, "kv_head", "sink_token", "feature")
        size = (shape.layers, shape.kv_heads, shape.sink_tokens, shape.head_size)
        return (
            TensorSpec("sink.keys", dims, size, shape.dtype, "keys of the prompt prefix, rotated"),
            TensorSpec("sink.values", dims, size, shape.dtype, "values of the prompt prefix"),
        )

    def live_tensors(self) -> dict[str, Tensor]:
        """Return the prompt prefix."""
        return {"sink.keys": self.keys[:, :, self.sink], "sink.values": self.values[:, :, self.sink]}

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the prompt prefix of a checked state."""
        self.started = False
        self.start(tensors["sink.keys"], tensors["sink.values"])

    def buffers(self) -> Mapping[str, Sequence[Tensor]]:
        """Return the bias of the prompt prefix, and the columns of the bias of all slots."""
        columns = [rows[..., self.keys.shape[-1] :] for rows in self._rows or ()]
        return {"sink": (self.bias[:, :, self.sink],)} | ({"columns": columns} if columns else {})


@dataclass(frozen=True, slots=True)
class Tokens:
    """Exact tokens in stream order."""

    keys: Tensor  # `[L, H, n, D]` model dtype, rotated
    values: Tensor  # `[L, H, n, D]` model dtype
    positions: Tensor  # `[n, P]` int64
    coordinates: Tensor  # `[n, 2]` float32
    usable: Tensor  # `[n]` bool; False for dropped tokens, which are zeros and count for nothing

    def __len__(self) -> int:
        return len(self.positions)


class NearWindow(StatePart):
    """A ring of W exact tokens in the near part of the slots; `keys` to `usable` are as in `Tokens`, of the slots."""

    def __init__(self, slots: Slots, position_components: int) -> None:
        near = slots.near
        self.keys, self.values = slots.keys[:, :, near], slots.values[:, :, near]
        self._bias = slots.bias[:, :, near]
        W, device = self.keys.shape[2], self.keys.device
        self.positions = torch.zeros(W, position_components, dtype=torch.int64, device=device)
        self.coordinates = torch.zeros(W, 2, device=device)
        self.step = torch.full((W,), -1, device=device)
        self.usable = torch.ones(W, dtype=torch.bool, device=device)
        self.last_step = -1
        self._start = 0
        # The slot numbers twice, so that `n` slots of the ring from any start are one slice.
        self._twice = torch.arange(W, device=device).repeat(2)
        # Tokens of each held step, oldest first. Mirrors `step`, so that eviction asks nothing of the device.
        self._lengths: deque[int] = deque()

    def __len__(self) -> int:
        return sum(self._lengths)

    def append(self, step: StepKV) -> Tokens:
        """Take a step; return the tokens that left for it, in stream order."""
        W, T = len(self.step), len(step.positions)
        kept, usable = min(T, W), step.usable
        if usable is None:
            usable = torch.ones(T, dtype=torch.bool, device=self.step.device)
        new = Tokens(step.keys, step.values, step.positions, step.coordinates, usable)
        leaving = 0
        while self._lengths and len(self) + T > W:
            leaving += self._lengths[0]
            self._evict(self._lengths.popleft())
        # Evicted tokens stay in their slots until they are overwritten below, so they are copied out first.
        left = self._ring(self._start - leaving, leaving)
        out = self._at(left)
        self.usable.index_fill_(0, left, True)
        if kept < T:
            surplus = {name: getattr(new, name).narrow(axis, 0, T - kept) for name, axis in _AXES.items()}
            out = Tokens(**{n: torch.cat((getattr(out, n), surplus[n]), axis) for n, axis in _AXES.items()})
        if kept:
            slots = self._ring(self._start + len(self), kept)
            for name, axis in _AXES.items():
                getattr(self, name).index_copy_(axis, slots, getattr(new, name).narrow(axis, T - kept, kept))
            self.step.index_fill_(0, slots, step.step)
            self._bias[:, :, slots] = usable[T - kept :].log()
            self._lengths.append(kept)
        self.last_step = step.step
        return out

    def newest(self) -> Tokens:
        """Return copies of the tokens of the newest step that are in the window."""
        n = self._lengths[-1] if self._lengths else 0
        return self._at(self._ring(self._start + len(self) - n, n))

    def _evict(self, n: int) -> None:
        slots = self._ring(self._start, n)
        # Written by an index, a number is copied from the host first.
        self._bias.index_fill_(2, slots, -torch.inf)
        self.step.index_fill_(0, slots, -1)
        self._start = (self._start + n) % len(self.step)

    def _ring(self, start: int, n: int) -> Tensor:
        first = start % max(len(self.step), 1)
        return self._twice[first : first + n]

    def _at(self, slots: Tensor) -> Tokens:
        return Tokens(**{name: getattr(self, name).index_select(axis, slots) for name, axis in _AXES.items()})

    @staticmethod
    def declare(shape: MemoryShape, tokens: int | None) -> tuple[TensorSpec, ...]:
        """Declare a window of W tokens, or of any number (None)."""
        L, H, D, P, W = shape.layers, shape.kv_heads, shape.head_size, shape.position_components, tokens
        kv, token, place = (LAYER, "kv_head", "near_token", "feature"), ("near_token",), "stream position of each token"
        i64, f32 = torch.int64, torch.float32
        return (
            TensorSpec("near.keys", kv, (L, H, W, D), shape.dtype, "keys of the near window, rotated"),
            TensorSpec("near.values", kv, (L, H, W, D), shape.dtype, "values of the near window"),
            TensorSpec("near.positions", (*token, "component"), (W, P), i64, place, "position"),
            TensorSpec("near.coordinates", (*token, "xy"), (W, 2), f32, "centre of each cell", "share of the image"),
            TensorSpec("near.step", token, (W,), i64, "step of each token; -1: free", "step", fill=-1),
            TensorSpec("near.usable", token, (W,), torch.bool, "False for tokens dropped as not finite", fill=1),
            TensorSpec("near.ring", ("field",), (3,), i64, "first slot in use, slots in use, last step seen"),
        )

    def live_tensors(self) -> dict[str, Tensor]:
        """Return its part of the state."""
        held = {f"near.{name}": getattr(self, name) for name in (*_AXES, "step")}
        return held | {"near.ring": torch.tensor([self._start, len(self), self.last_step])}

    def buffers(self) -> Mapping[str, Sequence[Tensor]]:
        """Return the bias of its slots."""
        return {"near": (self._bias,)}

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the state of a window of this size, or of a smaller one that never evicted."""
        W = len(tensors["near.step"])
        self._start, count, self.last_step = tensors["near.ring"].tolist()
        if not (0 <= self._start < max(W, 1) and 0 <= count <= W):
            raise StateCorrupt(f"state: tensor near.ring holds {self._start}, {count} for a window of {W}")
        self.usable.fill_(True)
        for name, axis in {**_AXES, "step": 0}.items():
            getattr(self, name).narrow(axis, 0, W).copy_(tensors[f"near.{name}"])
        ring = (self._start + torch.arange(count, device=self.step.device)) % max(W, 1)
        self._lengths = deque(torch.unique_consecutive(self.step[ring], return_counts=True)[1].tolist())
        self._bias.fill_(-torch.inf)
        self._bias[:, :, ring] = self.usable[ring].log()
