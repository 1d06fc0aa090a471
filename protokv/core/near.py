"""`NearWindow`: the most recent steps, exact, in a ring of W slots that attention reads in place.

The storage of keys and values is a view of the context's slots, so nothing is copied to be shown. Whole steps
leave, oldest first, when the window would exceed W; of a step larger than W the last W tokens stay and the
others leave at once. Invariants: held tokens are the ring positions `start .. start + count`, in stream
order; the bias is 0 on these and -inf on all others. Knows nothing of who takes what leaves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from protokv.core.memory import MemoryShape, StepKV
from protokv.core.slots import Slots
from protokv.core.tensors import LAYER, Clock, StatePart, TensorSpec
from protokv.errors import StateCorrupt


@dataclass(frozen=True, slots=True)
class Tokens:
    """Exact tokens in stream order.

    Attributes:
        keys, values: `[L, H, n, D]` model dtype, keys rotated.
        positions: `[n, P]` int64.
        coordinates: `[n, 2]` float32.
        usable: `[n]` bool; the others were dropped: they are zeros, and count for nothing.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    coordinates: Tensor
    usable: Tensor

    def __len__(self) -> int:
        return self.positions.shape[0]


class NearWindow(StatePart):
    """A ring of W exact tokens in the near part of the slots."""

    promise: ClassVar[str] = "near window: its tokens in the order of the stream, up to the last step"

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
        # All slots twice over: `n` of a ring are a part of it.
        self._twice = torch.arange(W, device=device).repeat(2)
        # Tokens of each held step, oldest first. Mirrors `step`, so that eviction asks nothing of the device.
        self._lengths: deque[int] = deque()

    def __len__(self) -> int:
        return sum(self._lengths)

    def append(self, step: StepKV) -> Tokens:
        """Take a step; return what left for it, in stream order."""
        W, T = self.step.shape[0], step.positions.shape[0]
        usable = self._ones(T) if step.usable is None else step.usable
        leaving = 0
        while self._lengths and len(self) + T > W:
            leaving += self._lengths[0]
            self._evict(self._lengths.popleft())
        held = len(self)
        # The evicted ones stay in their slots until they are overwritten below, so they are copied out first.
        left = self._ring(self._start - leaving, leaving)
        out = self._at(left)
        # A free slot says nothing of what left it.
        self.usable[left] = True
        kept = min(T, W)
        if kept < T:
            cut = T - kept
            out = Tokens(
                torch.cat((out.keys, step.keys[:, :, :cut]), 2),
                torch.cat((out.values, step.values[:, :, :cut]), 2),
                torch.cat((out.positions, step.positions[:cut])),
                torch.cat((out.coordinates, step.coordinates[:cut])),
                torch.cat((out.usable, usable[:cut])),
            )
        if kept:
            slots = self._ring(self._start + held, kept)
            self.keys.index_copy_(2, slots, step.keys[:, :, T - kept :])
            self.values.index_copy_(2, slots, step.values[:, :, T - kept :])
            self.positions[slots] = step.positions[T - kept :]
            self.coordinates[slots] = step.coordinates[T - kept :]
            self.step[slots] = step.step
            self.usable[slots] = usable[T - kept :]
            self._bias[:, :, slots] = usable[T - kept :].log()
            self._lengths.append(kept)
        self.last_step = step.step
        return out

    def newest(self) -> Tokens:
        """Copies of the tokens of the newest step that are in the window."""
        n = self._lengths[-1] if self._lengths else 0
        return self._at(self._ring(self._start + len(self) - n, n))

    def _evict(self, n: int) -> None:
        slots = self._ring(self._start, n)
        self._bias[:, :, slots] = -torch.inf
        self.step[slots] = -1
        self._start = (self._start + n) % self.step.shape[0]

    def _ring(self, start: int, n: int) -> Tensor:
        first = start % max(self.step.shape[0], 1)
        return self._twice[first : first + n]

    def _at(self, slots: Tensor) -> Tokens:
        return Tokens(
            self.keys.index_select(2, slots),
            self.values.index_select(2, slots),
            self.positions[slots],
            self.coordinates[slots],
            self.usable[slots],
        )

    def _ones(self, n: int) -> Tensor:
        return torch.ones(n, dtype=torch.bool, device=self.step.device)

    @staticmethod
    def declare(shape: MemoryShape, tokens: int | None) -> tuple[TensorSpec, ...]:
        """A window of W tokens, or of any number (None)."""
        L, H, D, W = shape.layers, shape.kv_heads, shape.head_size, tokens
        kv = (LAYER, "kv_head", "near_token", "feature")
        return (
            TensorSpec("near.keys", kv, (L, H, W, D), shape.dtype, "keys of the near window, rotated"),
            TensorSpec("near.values", kv, (L, H, W, D), shape.dtype, "values of the near window"),
            TensorSpec(
                "near.positions",
                ("near_token", "component"),
                (W, shape.position_components),
                torch.int64,
                "stream position of each token of the near window",
                "position",
            ),
            TensorSpec(
                "near.coordinates",
                ("near_token", "xy"),
                (W, 2),
                torch.float32,
                "centre of each token's cell",
                "share of the image",
            ),
            TensorSpec(
                "near.step", ("near_token",), (W,), torch.int64, "step of each token; -1: free", "step", fill=-1
            ),
            TensorSpec(
                "near.usable",
                ("near_token",),
                (W,),
                torch.bool,
                "whether a token is shown; the others were dropped as not finite",
                fill=1,
                optional=True,
            ),
            TensorSpec("near.ring", ("field",), (3,), torch.int64, "first slot in use, slots in use, last step seen"),
        )

    def held(self) -> dict[str, Tensor]:
        """Its part of the state."""
        return {
            "near.keys": self.keys,
            "near.values": self.values,
            "near.positions": self.positions,
            "near.coordinates": self.coordinates,
            "near.step": self.step,
            "near.usable": self.usable,
            "near.ring": torch.tensor([self._start, len(self), self.last_step]),
        }

    def buffers(self) -> Mapping[str, Sequence[Tensor]]:
        """The bias of its slots."""
        return {"near": (self._bias,)}

    def check(self, tensors: Mapping[str, Tensor], clock: Clock | None) -> None:
        """The ring, its steps and its positions are in the order of the stream, up to the last step."""
        steps, positions = tensors["near.step"], tensors["near.positions"]
        W = steps.shape[0]
        if "intake.dropped" in tensors and "near.usable" not in tensors:
            raise StateCorrupt("state: tensor near.usable is missing, and tokens are counted as dropped")
        start, count, last_step = tensors["near.ring"].tolist()
        if not (0 <= start < max(W, 1) and 0 <= count <= W and last_step >= -1):
            raise StateCorrupt(f"state: tensor near.ring holds {start}, {count}, {last_step} for a window of {W}")
        ring = (start + torch.arange(W, device=steps.device)) % max(W, 1)
        steps = steps[ring]
        held, free = steps[:count], steps[count:]
        in_order = (held >= 0).all() & (held.diff() >= 0).all() & (free == -1).all()
        newest = int(held[-1]) if count else last_step
        if not in_order or newest != last_step:
            raise StateCorrupt("state: tensor near.step does not agree with near.ring")
        if (positions[ring[:count], :1].diff(dim=0) < 0).any():
            raise StateCorrupt("state: tensor near.positions is not in the order of the stream")
        if clock is None:
            return
        if last_step != clock.steps - 1:
            raise StateCorrupt(f"state: tensor near.ring ends at step {last_step}, the clock at {clock.steps - 1}")
        if count > clock.tokens_seen:
            raise StateCorrupt(f"state: tensor near.ring holds {count} tokens of {clock.tokens_seen} seen")

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Take a checked state: of a window of this size, or of a smaller one that never evicted."""
        W = tensors["near.step"].shape[0]
        self._start, count, self.last_step = tensors["near.ring"].tolist()
        self.keys[:, :, :W] = tensors["near.keys"]
        self.values[:, :, :W] = tensors["near.values"]
        self.positions[:W] = tensors["near.positions"]
        self.coordinates[:W] = tensors["near.coordinates"]
        self.step[:W] = tensors["near.step"]
        self.usable.fill_(True)
        if "near.usable" in tensors:
            self.usable[:W] = tensors["near.usable"]
        ring = (self._start + torch.arange(count, device=self.step.device)) % max(W, 1)
        self._lengths = deque(torch.unique_consecutive(self.step[ring], return_counts=True)[1].tolist())
        self._bias.fill_(-torch.inf)
        self._bias[:, :, ring] = self.usable[ring].log()
