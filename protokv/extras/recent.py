"""`RecentSteps` and `WithRecent`: any memory, and besides it the last steps as the vision tower gave them.

A question reads these steps afresh behind the memory, in place of what the memory made of them when they came: the
largest gain of DSCache (arXiv 2605.01858) and SimpleStream (arXiv 2604.02317) in real-time questions. What is kept is
embeddings and positions of at most `recent_frames` frames, a part of the state like any other; who forwards them is
whoever asks. While a memory holds all it has seen, reading afresh is what reading its keys would be.

The memory behind it sees everything as without this, and shows a question nothing that stands where the recent steps
do: exact tokens and prototypes of one token are hidden, prototypes of several stay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from protokv.core.context import Context
from protokv.core.memory import Memory, MemoryShape, StepKV
from protokv.core.tensors import Clock, StatePart, TensorSpec, check_shapes, check_values, shapes_of
from protokv.errors import StateCorrupt

# Tokens, rows, columns, first and last visual token, step.
FIELDS = 6


@dataclass(frozen=True, slots=True)
class RecentStep:
    """A step as it is forwarded.

    Attributes:
        embeddings: `[T, E]` model dtype.
        positions: `[T, P]` int64, stream positions.
        grid: rows and columns of the visual tokens.
        visual: first visual token and the one behind the last.
        step: its index.
        deepstack: `[n, V, E]`, for families that feed more than embeddings to the layers.
    """

    embeddings: Tensor
    positions: Tensor
    grid: tuple[int, int]
    visual: tuple[int, int]
    step: int
    deepstack: Tensor | None = None


class RecentSteps(StatePart):
    """The last N steps."""

    promise: ClassVar[str] = "recent steps: whole, in the order of the stream, up to its end"

    def __init__(self, steps: int, shape: MemoryShape) -> None:
        self._shape, self._most = shape, steps
        self.steps: deque[RecentStep] = deque(maxlen=steps)

    @staticmethod
    def declare(shape: MemoryShape) -> tuple[TensorSpec, ...]:
        """Their tokens one behind the other, and a row of numbers for each step."""
        token, wide = ("recent_token",), "embedding"
        return (
            TensorSpec(
                "recent.embeddings", (*token, wide), (None, None), shape.dtype, "recent steps as the model reads them"
            ),
            TensorSpec(
                "recent.positions", (*token, "component"), (None, shape.position_components), torch.int64,
                "their stream positions", "position",
            ),
            TensorSpec(
                "recent.steps", ("recent_step", "field"), (None, FIELDS), torch.int64,
                "tokens, rows, columns, first visual token, the one behind the last, step",
            ),
            TensorSpec(
                "recent.deepstack", ("vision_layer", "recent_visual_token", wide), (None, None, None), shape.dtype,
                "what is added to their visual tokens in the first layers", optional=True,
            ),
        )  # fmt: skip

    def held(self) -> dict[str, Tensor]:
        """All of them."""
        steps, P = self.steps, self._shape.position_components
        if not steps:
            nothing = torch.zeros(0, 0, dtype=self._shape.dtype)
            return {
                "recent.embeddings": nothing,
                "recent.positions": torch.zeros(0, P, dtype=torch.int64),
                "recent.steps": torch.zeros(0, FIELDS, dtype=torch.int64),
            }
        found = {
            "recent.embeddings": torch.cat([one.embeddings for one in steps]),
            "recent.positions": torch.cat([one.positions for one in steps]),
            "recent.steps": torch.tensor([[len(one.positions), *one.grid, *one.visual, one.step] for one in steps]),
        }
        deep = [one.deepstack for one in steps if one.deepstack is not None]
        return found | ({"recent.deepstack": torch.cat(deep, 1)} if deep else {})

    def check(self, tensors: Mapping[str, Tensor], clock: Clock | None) -> None:
        """Rows that speak of the tokens that there are."""
        rows = tensors["recent.steps"].tolist()
        total = tensors["recent.embeddings"].shape[0]
        sound = len(rows) <= self._most and sum(row[0] for row in rows) == total
        for tokens, height, width, first, last, step in rows:
            sound &= 0 <= first < last <= tokens and last - first <= height * width and step >= 0
        steps = [row[5] for row in rows]
        sound &= steps == sorted(set(steps))
        if "recent.deepstack" in tensors:
            sound &= tensors["recent.deepstack"].shape[1] == sum(row[4] - row[3] for row in rows)
        if clock is not None:
            sound &= steps == list(range(max(0, clock.steps - self._most), clock.steps))
        if not sound:
            raise StateCorrupt("state: tensor recent.steps does not agree with the recent tokens or the clock")

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Take checked steps."""
        self.steps.clear()
        device = self._shape.device
        start = seen = 0
        deep = tensors.get("recent.deepstack")
        for tokens, height, width, first, last, step in tensors["recent.steps"].tolist():
            own, visual = slice(start, start + tokens), slice(seen, seen + last - first)
            self.steps.append(
                RecentStep(
                    tensors["recent.embeddings"][own].to(device, copy=True),
                    tensors["recent.positions"][own].to(device, copy=True),
                    (height, width),
                    (first, last),
                    step,
                    None if deep is None else deep[:, visual].to(device, copy=True),
                )
            )
            start, seen = own.stop, visual.stop


class WithRecent(Memory):
    """A memory and the last steps."""

    def __init__(self, inner: Memory, steps: int, shape: MemoryShape) -> None:
        """Beside an empty memory, or one that is to be loaded."""
        self.bounded, self.joins_steps = inner.bounded, inner.joins_steps
        self._inner, self._recent, self._shape = inner, RecentSteps(steps, shape), shape

    def start(self, keys: Tensor, values: Tensor) -> None:
        """Take the prompt prefix."""
        self._inner.start(keys, values)

    def select(self, features: Tensor, grid: tuple[int, int]) -> Tensor | None:
        """As the memory does."""
        return self._inner.select(features, grid)

    def probes_for(self, tokens: int) -> Sequence[str]:
        """As the memory does."""
        return self._inner.probes_for(tokens)

    def compact(self, queries: Sequence[Tensor], tokens: int) -> None:
        """As the memory does."""
        self._inner.compact(queries, tokens)

    def append(self, step: StepKV) -> None:
        """Take one step."""
        self._inner.append(step)

    def remember(self, step: RecentStep) -> None:
        """Keep a step that was appended; the oldest goes."""
        self._recent.steps.append(step)

    def recent(self) -> Sequence[RecentStep]:
        """The last steps, oldest first."""
        return tuple(self._recent.steps)

    def context(self) -> Context:
        """What a new step attends to: the memory, the recent steps as they are in it."""
        return self._inner.context()

    def recall(self) -> Context:
        """The memory without what stands where the recent steps do."""
        context = self._inner.recall()
        steps = self._recent.steps
        return context.before(int(steps[0].positions[:, 0].min())) if steps else context

    def specs(self) -> tuple[TensorSpec, ...]:
        """Those of the memory and of the recent steps."""
        return (*self._inner.specs(), *RecentSteps.declare(self._shape))

    def tensors(self) -> dict[str, Tensor]:
        """Those of the memory and of the recent steps."""
        return self._inner.tensors() | self._recent.held()

    def load(self, tensors: Mapping[str, Tensor], clock: Clock | None = None) -> None:
        """Take both parts; nothing is changed when one of them is refused."""
        own, rest = self._parted(tensors)
        check_shapes(shapes_of(own), RecentSteps.declare(self._shape))
        self._check(own, clock)
        self._inner.load(rest, clock)
        self._recent.take(own)

    def check(self, clock: Clock, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Hold both parts against the clock."""
        own, rest = (self._recent.held(), None) if tensors is None else self._parted(tensors)
        self._inner.check(clock, rest)
        self._check(own, clock)

    def promises(self) -> list[str]:
        """What `check` holds the state to, a line each."""
        return [*self._inner.promises(), self._recent.promise]

    @staticmethod
    def _parted(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        own = {name: tensor for name, tensor in tensors.items() if name.startswith("recent.")}
        return own, {name: tensor for name, tensor in tensors.items() if name not in own}

    def _check(self, own: Mapping[str, Tensor], clock: Clock | None) -> None:
        check_values(own, RecentSteps.declare(self._shape), clock)
        self._recent.check(own, clock)

    def nbytes(self) -> dict[str, int]:
        """Bytes by part, with those of the recent steps."""
        return self._inner.nbytes() | self._recent.nbytes()

    def report(self) -> dict[str, Any]:
        """What the memory says, and how many tokens a question reads afresh."""
        return self._inner.report() | {"recent_tokens": sum(len(one.positions) for one in self._recent.steps)}
