"""The near window: the most recent steps, exact, in slots that attention reads in place.

`NearWindow` is a ring of W tokens in the near part of `KVSlots`. Whole steps leave it, oldest
first, before it exceeds W; of a step larger than W the last W tokens stay. Invariant: the tokens
held are ring positions `start .. start + count`, in stream order; their bias is 0, or `-inf` for
tokens dropped as not finite, and `-inf` in free slots.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from protokv.core.slots import KVSlots
from protokv.core.step import StepKV
from protokv.core.tensors import MemoryShape, Specs, StateTensors, TensorDict, TensorGroups, Tensors
from protokv.device.runs import Plan
from protokv.errors import StateCorrupt

# The parts of tokens, and the axis of each that counts them.
_AXES = {"keys": 2, "values": 2, "positions": 0, "coordinates": 0, "usable": 0}


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
    """What a step does to a window, in tokens. Once a window is full, steps of one size make equal
    moves.
    """

    before: int  # of the step before it
    held: int  # before it comes, all together
    leaving: int  # of these, the oldest
    kept: int  # of the step, the last ones
    surplus: int = 0  # of the step, those that a smaller window has no room for


class NearWindow(StateTensors):
    """A ring of W exact tokens in the near part of the slots; `keys` to `usable` are as in
    `ExactTokens`, of the slots.

    A step is `plan`, on the host, and on the device `begin`, `leaving` and `write`. What these do
    depends on the sizes of its `WindowMove` alone; where the ring begins, and which step it is,
    they read from the numbers of the plan.
    """

    def __init__(
        self, slots: KVSlots, position_components: int, *, steps: int | None = None
    ) -> None:
        """Make an empty window of at most `steps` steps, None: of any number."""
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
        # Tokens of each held step, oldest first. Mirrors `step`, so that eviction asks nothing of
        # the device.
        self._lengths: deque[int] = deque()
        self._start = 0  # first slot in use
        self.last_step = -1  # the last step seen; -1: none
        self.begin(WindowMove(0, 0, 0, 0), torch.zeros(2, device=device))

    def __len__(self) -> int:
        return sum(self._lengths)

    def plan(self, step: int, tokens: int) -> Plan:
        """Make room for a step of so many tokens, on the host alone; return its move, with the
        first slot in use and the number of the step.
        """
        W = len(self.step)
        held = len(self)
        before = self._lengths[-1] if self._lengths else 0
        leaving = 0
        while self._lengths and (held - leaving + tokens > W or len(self._lengths) == self._steps):
            leaving += self._lengths.popleft()
        kept = min(tokens, W)
        if kept:
            self._lengths.append(kept)
        plan = Plan(WindowMove(before, held, leaving, kept, tokens - kept), (self._start, step))
        self._start = (self._start + leaving) % self._wrap
        self.last_step = step
        return plan

    def begin(self, move: WindowMove, numbers: Tensor) -> None:
        """Find the slots of a planned step, in stream order: of the tokens before it, and of its
        own.
        """
        start, self._number = numbers[:2].long()
        some = self._line[: move.held + move.kept]
        self._move = move
        self._ring = (some + start).remainder_(self._wrap)

    def leaving(self, step: StepKV) -> ExactTokens:
        """Return copies of the tokens that leave for the planned step, in stream order, before
        `write`.
        """
        move = self._move
        out = self._at(self._ring[: move.leaving])
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
        move = self._move
        left = self._ring[: move.leaving]
        slots = self._ring[move.held :]
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
            self.step.index_copy_(0, slots, self._number.expand(move.kept))
            self._bias[:, :, slots] = step.usable.log()

    def before(self) -> ExactTokens:
        """Return copies of the tokens of the step before the planned one that are in the window,
        before `write`.
        """
        move = self._move
        return self._at(self._ring[move.held - move.before : move.held])

    def newest(self) -> ExactTokens:
        """Return copies of the tokens of the newest step that are in the window."""
        return self._at(self._ring[self._move.held :])

    def _at(self, slots: Tensor) -> ExactTokens:
        return ExactTokens(
            **{name: getattr(self, name).index_select(axis, slots) for name, axis in _AXES.items()}
        )

    @staticmethod
    def declare(shape: MemoryShape, tokens: int | None) -> Specs:
        """Declare a window of W tokens, or of any number (None)."""
        declare = shape.axes(near_token=tokens, xy=2, field=3).declare
        kv = "layer kv_head near_token feature"
        i64 = torch.int64
        return (
            declare("near.keys", kv, shape.dtype, "keys of the near window, rotated"),
            declare("near.values", kv, shape.dtype, "values of the near window"),
            declare(
                "near.positions",
                "near_token component",
                i64,
                "stream position of each token",
                "position",
            ),
            declare(
                "near.coordinates",
                "near_token xy",
                torch.float32,
                "centre of each cell",
                "share of the image",
            ),
            declare("near.step", "near_token", i64, "step of each token; -1: free", "step", -1),
            declare(
                "near.usable",
                "near_token",
                torch.bool,
                "False for tokens dropped as not finite",
                fill=1,
            ),
            declare("near.ring", "field", i64, "first slot in use, slots in use, last step seen"),
        )

    def live_tensors(self) -> TensorDict:
        """Return its part of the state."""
        held = {f"near.{name}": getattr(self, name) for name in (*_AXES, "step")}
        return held | {"near.ring": torch.tensor([self._start, len(self), self.last_step])}

    def buffers(self) -> TensorGroups:
        """Return the bias of its slots."""
        return {"near": (self._bias,)}

    def take(self, tensors: Tensors) -> None:
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
        self._start = start
        self.last_step = last_step
        place = torch.tensor([start, last_step], device=self.step.device)
        self.begin(WindowMove(0, count - n, 0, n), place)
        self._bias.fill_(-torch.inf)
        self._bias[:, :, ring] = self.usable[ring].log()
