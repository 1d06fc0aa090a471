"""`NearWindow`: the most recent steps, exact, in a ring of W slots that attention reads in place.

The storage of keys and values is a view of the context's slots, so nothing is copied to be shown. Whole steps
leave, oldest first, when the window would exceed W; of a step larger than W the last W tokens stay and the
others leave at once. Invariants: held tokens are the ring positions `start .. start + count`, in stream
order; the bias is 0 on these and -inf on all others. Knows nothing of who takes what leaves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from protokv.errors import StateCorrupt
from protokv.memory.base import Spec, StepKV, size_of
from protokv.memory.slots import Slots

# Of its part of the state, what is the same for all layers (`Memory.layer_axis`).
LAYER_AXIS = dict.fromkeys(("near.positions", "near.coordinates", "near.step", "near.ring"))


@dataclass(frozen=True, slots=True)
class Tokens:
    """Exact tokens in stream order.

    Attributes:
        keys, values: `[L, H, n, D]` model dtype, keys rotated.
        positions: `[n, P]` int64.
        coordinates: `[n, 2]` float32.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    coordinates: Tensor

    def __len__(self) -> int:
        return self.positions.shape[0]


class NearWindow:
    """A ring of W exact tokens in the near part of the slots."""

    def __init__(self, slots: Slots, position_components: int) -> None:
        near = slots.near
        self.keys, self.values = slots.keys[:, :, near], slots.values[:, :, near]
        self._bias = slots.bias[:, :, near]
        W, device = self.keys.shape[2], self.keys.device
        self.positions = torch.zeros(W, position_components, dtype=torch.int64, device=device)
        self.coordinates = torch.zeros(W, 2, device=device)
        self.step = torch.full((W,), -1, device=device)
        self.last_step = -1
        self._start = 0
        # Tokens of each held step, oldest first. Mirrors `step`, so that eviction asks nothing of the device.
        self._lengths: deque[int] = deque()

    def __len__(self) -> int:
        return sum(self._lengths)

    def append(self, step: StepKV) -> Tokens:
        """Take a step; return what left for it, in stream order."""
        W, T = self.step.shape[0], step.positions.shape[0]
        leaving = 0
        while self._lengths and len(self) + T > W:
            leaving += self._lengths[0]
            self._evict(self._lengths.popleft())
        held = len(self)
        # The evicted ones stay in their slots until they are overwritten below, so they are copied out first.
        out = self._at(self._ring(self._start - leaving, leaving))
        kept = min(T, W)
        if kept < T:
            cut = T - kept
            out = Tokens(
                torch.cat((out.keys, step.keys[:, :, :cut]), 2),
                torch.cat((out.values, step.values[:, :, :cut]), 2),
                torch.cat((out.positions, step.positions[:cut])),
                torch.cat((out.coordinates, step.coordinates[:cut])),
            )
        if kept:
            slots = self._ring(self._start + held, kept)
            self.keys.index_copy_(2, slots, step.keys[:, :, T - kept :])
            self.values.index_copy_(2, slots, step.values[:, :, T - kept :])
            self.positions[slots] = step.positions[T - kept :]
            self.coordinates[slots] = step.coordinates[T - kept :]
            self.step[slots] = step.step
            self._bias[:, :, slots] = 0.0
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
        device = self.step.device
        return (start + torch.arange(n, device=device)) % self.step.shape[0] if n else torch.arange(0, device=device)

    def _at(self, slots: Tensor) -> Tokens:
        return Tokens(
            self.keys.index_select(2, slots),
            self.values.index_select(2, slots),
            self.positions[slots],
            self.coordinates[slots],
        )

    def nbytes(self) -> int:
        """Bytes of the window, its slots included."""
        return size_of(self.keys, self.values, self._bias, self.positions, self.coordinates, self.step)

    def tensors(self) -> dict[str, Tensor]:
        """Its part of the state; `near.ring` is (start, count, index of the last step seen)."""
        return {
            "near.keys": self.keys.contiguous(),
            "near.values": self.values.contiguous(),
            "near.positions": self.positions,
            "near.coordinates": self.coordinates,
            "near.step": self.step,
            "near.ring": torch.tensor([self._start, len(self), self.last_step]),
        }

    def spec(self) -> Spec:
        """Shapes and dtypes of `tensors`."""
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self.tensors().items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take a state whose shapes are checked: of a window of this size, or of a smaller one that never
        evicted.

        Raises:
            StateCorrupt: ring and step indices contradict each other; nothing is changed.
        """
        W = tensors["near.step"].shape[0]
        start, count, last_step = (int(value) for value in tensors["near.ring"].tolist())
        if not (0 <= start < max(W, 1) and 0 <= count <= W and last_step >= -1):
            raise StateCorrupt(f"state: tensor near.ring holds {start}, {count}, {last_step} for a window of {W}")
        ring = [(start + offset) % W for offset in range(W)]
        steps = tensors["near.step"].tolist()
        held, free = [steps[slot] for slot in ring[:count]], [steps[slot] for slot in ring[count:]]
        newest = held[-1] if held else last_step
        if held != sorted(held) or min(held, default=0) < 0 or set(free) > {-1} or newest != last_step:
            raise StateCorrupt("state: tensor near.step does not agree with near.ring")
        self.keys[:, :, :W] = tensors["near.keys"]
        self.values[:, :, :W] = tensors["near.values"]
        self.positions[:W] = tensors["near.positions"]
        self.coordinates[:W] = tensors["near.coordinates"]
        self.step[:W] = tensors["near.step"]
        self._start, self.last_step = start, last_step
        self._lengths = deque(held.count(step) for step in dict.fromkeys(held))
        self._bias.fill_(-torch.inf)
        self._bias[:, :, torch.tensor(ring[:count], dtype=torch.int64, device=self.step.device)] = 0.0
