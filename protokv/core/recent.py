"""`WithRecent`: any memory, and besides it the last steps as the vision tower gave them.

A question reads these steps again after the memory, in place of the tokens that the memory has of them, as in DSCache
(arXiv 2605.01858) and SimpleStream (arXiv 2604.02317). The memory sees everything as without this; for a question its
exact tokens and prototypes of one token from the time of these steps are hidden.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from protokv.core.context import Context
from protokv.core.memory import Memory
from protokv.core.step import StepKV, StepTokens
from protokv.core.tensors import MemoryShape, StatePart, TensorSpec
from protokv.errors import StateCorrupt


class RecentSteps(StatePart):
    """The last N steps, each with its stream positions `[T, P]`; saved as one, with a row of numbers for each."""

    def __init__(self, steps: int, shape: MemoryShape) -> None:
        self._shape = shape
        self.steps: deque[tuple[StepTokens, Tensor]] = deque(maxlen=steps)

    @staticmethod
    def declare(shape: MemoryShape) -> tuple[TensorSpec, ...]:
        """Declare tokens, positions and rows of numbers."""
        token, wide, i64 = "recent_token", "embedding", torch.int64
        row, deep = ("recent_step", "field"), ("vision_layer", "recent_visual_token", wide)
        places, numbers = (token, "component"), "tokens, rows, columns, first visual token, the one after the last"
        P, added = shape.position_components, "what is added to their visual tokens in the first layers"
        return (
            TensorSpec("recent.embeddings", (token, wide), (None, None), shape.dtype, "steps as the model reads them"),
            TensorSpec("recent.positions", places, (None, P), i64, "their stream positions", "position"),
            TensorSpec("recent.steps", row, (None, 5), i64, numbers),
            TensorSpec("recent.deepstack", deep, (None, None, None), shape.dtype, added, optional=True),
        )

    def live_tensors(self) -> dict[str, Tensor]:
        """Return all of them."""
        if not self.steps:
            return {spec.name: spec.allocate(torch.device("cpu")) for spec in self.declare(self._shape)[:3]}
        tokens, positions = zip(*self.steps, strict=True)
        rows = [[len(one), *one.grid, *(one.visual or slice(None)).indices(len(one))[:2]] for one in tokens]
        held = torch.cat([one.embeddings for one in tokens]), torch.cat(positions), torch.tensor(rows)
        found = dict(zip(("recent.embeddings", "recent.positions", "recent.steps"), held, strict=True))
        deep = [one.deepstack for one in tokens if one.deepstack is not None]
        return found | ({"recent.deepstack": torch.cat(deep, 1)} if deep else {})

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Check that the rows divide the tokens into steps."""
        tokens, _, _, first, last = tensors["recent.steps"].unbind(1)
        sizes = [len(tensors["recent.embeddings"]), *tensors.get("recent.deepstack", torch.empty(0, 0)).shape[1:2]]
        wanted = [int(tokens.sum()), int((last - first).sum()) if "recent.deepstack" in tensors else 0]
        if sizes != wanted or not ((first >= 0) & (first < last) & (last <= tokens)).all():
            raise StateCorrupt("state: tensor recent.steps does not agree with the recent tokens")

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Take checked steps."""
        rows = tensors["recent.steps"].tolist()
        own = {name: tensor.to(self._shape.device, copy=True) for name, tensor in tensors.items()}
        parts = [own[name].split([row[0] for row in rows]) for name in ("recent.embeddings", "recent.positions")]
        deep: Sequence[Tensor | None] = [None] * len(rows)
        if "recent.deepstack" in own:
            deep = own["recent.deepstack"].split([last - first for *_, first, last in rows], 1)
        for (_, height, width, *visual), embeddings, positions, added in zip(rows, *parts, deep, strict=True):
            self.steps.append((StepTokens(embeddings, (height, width), slice(*visual), added), positions))


class WithRecent(Memory):
    """A memory (`inner`, empty at first), and the last steps (`part`)."""

    def __init__(self, inner: Memory, steps: int, shape: MemoryShape) -> None:
        self.inner, self.part, self._declared = inner, RecentSteps(steps, shape), RecentSteps.declare(shape)
        self.bounded, self.hides_recent, self.joins_steps = inner.bounded, inner.hides_recent, inner.joins_steps

    def start(self, keys: Tensor, values: Tensor) -> None:
        """Take the prompt prefix."""
        self.inner.start(keys, values)

    def select(self, features: Tensor, grid: tuple[int, int]) -> Tensor | None:
        """Select as the memory does."""
        return self.inner.select(features, grid)

    def append(self, step: StepKV) -> None:
        """Take one step."""
        self.inner.append(step)

    def context(self) -> Context:
        """Return the memory's context."""
        return self.inner.context()

    def observe(self, tokens: StepTokens, positions: Tensor) -> None:
        """Keep a step that was appended; the oldest one goes."""
        self.part.steps.append((tokens, positions))

    def prelude(self) -> Sequence[tuple[StepTokens, Tensor]]:
        """Return the last steps, oldest first."""
        return list(self.part.steps)

    def recall(self) -> Context:
        """Return the memory without the time of the recent steps."""
        context, steps = self.inner.recall(), self.part.steps
        return context.before(int(steps[0][1][:, 0].min())) if steps else context

    def specs(self) -> tuple[TensorSpec, ...]:
        """Return those of both."""
        return (*self.inner.specs(), *self._declared)

    def tensors(self) -> dict[str, Tensor]:
        """Return those of both."""
        return self.inner.tensors() | self.part.live_tensors()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take both."""
        own = {spec.name: tensors[spec.name] for spec in self._declared if spec.name in tensors}
        self.part.check(own)
        self.part.take(own)
        self.inner.load({name: tensor for name, tensor in tensors.items() if name not in own})

    def nbytes(self) -> dict[str, int]:
        """Return bytes by part."""
        return self.inner.nbytes() | self.part.nbytes()

    def report(self) -> dict[str, Any]:
        """Return the memory's report."""
        return self.inner.report()
