"""The near window: the most recent steps, exact, in slots that attention reads in place.

`NearWindow` is a ring of W tokens in the near part of `KVSlots`. Whole steps leave it, oldest
first, before it exceeds W; of a step larger than W the last W tokens stay. Invariant: the tokens
held are ring positions `start .. start + count`, in stream order; their bias is 0, or `-inf` for
tokens dropped as not finite, and `-inf` in free slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from protokv.core.slots import KVSlots
from protokv.core.step import StepKV
from protokv.core.tensors import LAYER, MemoryShape, StateTensors, TensorSpec
from protokv.errors import StateCorrupt

# The parts of tokens, and the axis of each that counts them.
_AXES: Final = {"keys": 2, "values": 2, "positions": 0, "coordinates": 0, "usable": 0}


@dataclass(frozen=True, slots=True)
class ExactTokens:
    """Exact tokens in stream order."""

    keys: Tensor  # `[L, H, n, D]` model dtype, rotated
    values: Tensor  # `[L, H, n, D]` model dtype
    positions: Tensor  # `[n, P]` int64
    coordinates: Tensor  # `[n, 2]` float32
    usable: Tensor  # `[n]` bool; False for dropped tokens, which are zeros and count for nothing

    def __len__(self) -> int:
        return len(self.positions)


@dataclass(frozen=True, slots=True)
class WindowMove:
    """What the next step does to a window, in tokens. Once a window is full, steps of one size make
    equal moves.
    """

    step: int  # number of the step
    start: int  # first slot in use before it comes
    before: int  # of the step before it
    held: int  # before it comes, all together
    leaving: int  # of these, the oldest
    kept: int  # of the step, the last ones
    surplus: int = 0  # of the step, those that a smaller window has no room for


class NearWindow(StateTensors):
    """A ring of W exact tokens in the near part of the slots; `keys` to `usable` are as in
    `ExactTokens`, of the slots.

    A step is `plan` and `tell`, on the host, and `write`, on the device. What that does depends on
    the sizes of the last `WindowMove` alone; where the ring begins, and which step it is, it reads
    from `told`.
    """

    def __init__(
        self, slots: KVSlots, position_components: int, *, steps: int | None = None, told: int = 0
    ) -> None:
        """Make an empty window of at most `steps` steps, None: of any number; `tell` takes `told`
        more numbers.
        """
        near = slots.near
        self.keys = slots.keys[:, :, near]
        self.values = slots.values[:, :, near]
        self._bias = slots.bias[:, :, near]
        self._steps = steps
        W = self.keys.shape[2]
        device = self.keys.device
        self.positions = torch.zeros(W, position_components, dtype=torch.int64, device=device)
        self.coordinates = torch.zeros(W, 2, device=device)
        self.step = torch.full((W,), -1, device=device)
        self.usable = torch.ones(W, dtype=torch.bool, device=device)
        self._line = torch.arange(2 * W, device=device)
        self._wrap = max(W, 1)
        # All that the host tells the device in a step: the first slot in use before it, its number,
        # and `told` more.
        self.told = torch.zeros(2 + told, dtype=torch.float64, device=device)
        self.move = WindowMove(-1, 0, 0, 0, 0, 0)
        self._found: tuple[Tensor, Tensor] | None = None
        # Tokens of each held step, oldest first. Mirrors `step`, so that eviction asks nothing of
        # the device.
        self._lengths: deque[int] = deque()

    def __len__(self) -> int:
        return sum(self._lengths)

    @property
    def last_step(self) -> int:
        """The last step seen; -1: none."""
        return self.move.step

    @property
    def _start(self) -> int:
        return (self.move.start + self.move.leaving) % self._wrap

    def append(self, step: StepKV) -> None:
        """Take a step."""
        self.plan(step.step, len(step.positions))
        self.tell()
        self.write(step)

    def plan(self, step: int, tokens: int) -> WindowMove:
        """Make room for a step of so many tokens, on the host alone; return what it does."""
        W = len(self.step)
        held = len(self)
        before = self._lengths[-1] if self._lengths else 0
        leaving = 0
        while self._lengths and (held - leaving + tokens > W or len(self._lengths) == self._steps):
            leaving += self._lengths.popleft()
        kept = min(tokens, W)
        if kept:
            self._lengths.append(kept)
        self.move = WindowMove(step, self._start, before, held, leaving, kept, tokens - kept)
        return self.move

    def tell(self, more: Sequence[float] = ()) -> None:
        """Tell the device what was planned, and more numbers, by one copy that nothing waits
        for.
        """
        told = torch.tensor([self.move.start, self.move.step, *more], dtype=torch.float64)
        if self.told.is_cuda:
            told = told.pin_memory()
        self.told[: len(told)].copy_(told, non_blocking=True)
        self._found = None

    def leaving(self, step: StepKV) -> ExactTokens:
        """Return copies of the tokens that leave for the planned step, in stream order, before
        `write`.
        """
        move = self.move
        out = self._at(self._ring()[0][: move.leaving])
        if move.surplus:
            surplus = step.tokens(slice(0, move.surplus))
            parts = {name: (getattr(out, name), getattr(surplus, name)) for name in _AXES}
            out = ExactTokens(
                **{name: torch.cat(both, _AXES[name]) for name, both in parts.items()}
            )
        return out

    def write(self, step: StepKV) -> None:
        """Take the step that was planned, on the device alone; which of its tokens are usable is
        known.
        """
        move, (ring, number) = self.move, self._ring()
        left = ring[: move.leaving]
        slots = ring[move.held :]
        # Written by an index, a number is copied from the host first.
        for held, axis, free in (
            (self._bias, 2, -torch.inf),
            (self.step, 0, -1),
            (self.usable, 0, True),
        ):
            held.index_fill_(axis, left, free)
        if move.surplus:
            step = step.tokens(slice(move.surplus, None))
        if move.kept:
            assert step.usable is not None
            for name, axis in _AXES.items():
                getattr(self, name).index_copy_(axis, slots, getattr(step, name))
            self.step.index_copy_(0, slots, number.expand(move.kept))
            self._bias[:, :, slots] = step.usable.log()

    def before(self) -> ExactTokens:
        """Return copies of the tokens of the step before the planned one that are in the window,
        before `write`.
        """
        move = self.move
        return self._at(self._ring()[0][move.held - move.before : move.held])

    def newest(self) -> ExactTokens:
        """Return copies of the tokens of the newest step that are in the window."""
        return self._at(self._ring()[0][self.move.held :])

    def _ring(self) -> tuple[Tensor, Tensor]:
        """Return slots, in stream order, of tokens before the last move and of its own; and its
        step, `[]` int64.
        """
        if self._found is None:
            start, number = self.told[:2].long()
            some = self._line[: self.move.held + self.move.kept]
            self._found = (some + start).remainder_(self._wrap), number
        return self._found

    def _at(self, slots: Tensor) -> ExactTokens:
        return ExactTokens(
            **{name: getattr(self, name).index_select(axis, slots) for name, axis in _AXES.items()}
        )

    @staticmethod
    def declare(shape: MemoryShape, tokens: int | None) -> tuple[TensorSpec, ...]:
        """Declare a window of W tokens, or of any number (None)."""
        L = shape.layers
        H = shape.kv_heads
        D = shape.head_size
        P = shape.position_components
        W = tokens
        kv = (LAYER, "kv_head", "near_token", "feature")
        token = ("near_token",)
        place = "stream position of each token"
        i64 = torch.int64
        f32 = torch.float32
        return (
            TensorSpec(
                "near.keys", kv, (L, H, W, D), shape.dtype, "keys of the near window, rotated"
            ),
            TensorSpec("near.values", kv, (L, H, W, D), shape.dtype, "values of the near window"),
            TensorSpec("near.positions", (*token, "component"), (W, P), i64, place, "position"),
            TensorSpec(
                "near.coordinates",
                (*token, "xy"),
                (W, 2),
                f32,
                "centre of each cell",
                "share of the image",
            ),
            TensorSpec(
                "near.step", token, (W,), i64, "step of each token; -1: free", "step", fill=-1
            ),
            TensorSpec(
                "near.usable",
                token,
                (W,),
                torch.bool,
                "False for tokens dropped as not finite",
                fill=1,
            ),
            TensorSpec(
                "near.ring",
                ("field",),
                (3,),
                i64,
                "first slot in use, slots in use, last step seen",
            ),
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
        start, count, last_step = tensors["near.ring"].tolist()
        if not (0 <= start < max(W, 1) and 0 <= count <= W):
            raise StateCorrupt(
                f"state: tensor near.ring holds {start}, {count} for a window of {W}"
            )
        self.usable.fill_(True)
        for name, axis in {**_AXES, "step": 0}.items():
            getattr(self, name).narrow(axis, 0, W).copy_(tensors[f"near.{name}"])
        ring = (start + torch.arange(count, device=self.step.device)) % max(W, 1)
        self._lengths = deque(
            torch.unique_consecutive(self.step[ring], return_counts=True)[1].tolist()
        )
        n = self._lengths[-1] if self._lengths else 0
        self.move = WindowMove(last_step, start, 0, count - n, 0, n)
        self.tell()
        self._bias.fill_(-torch.inf)
        self._bias[:, :, ring] = self.usable[ring].log()
