"""`RecentSteps` and `WithRecent`: any memory, and besides it the last steps as the vision tower gave them.

A question reads these steps again after the memory, in place of the tokens that the memory has of them: the
largest gain of DSCache (arXiv 2605.01858) and SimpleStream (arXiv 2604.02317) in real-time questions. The embeddings
and positions of at most `recent_frames` frames are a part of the state like any other. The memory sees everything as
without this; for a question its exact tokens and prototypes of one token from the time of these steps are hidden.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from protokv.core.context import Context
from protokv.core.memory import Memory
from protokv.core.step import StepTokens
from protokv.core.tensors import MemoryShape, StatePart, TensorSpec
from protokv.core.with_part import MemoryWithPart
from protokv.errors import StateCorrupt

# Tokens, rows, columns, first visual token, the one after the last, step.
FIELDS = 6


@dataclass(frozen=True, slots=True)
class RecentStep:
    """A step as it was forwarded: its tokens, their stream positions `[T, P]`, and its index."""

    tokens: StepTokens
    positions: Tensor
    step: int

    @property
    def fields(self) -> list[int]:
        """Its row of `recent.steps`."""
        start, stop, _ = (self.tokens.visual or slice(None)).indices(len(self.tokens))
        return [len(self.tokens), *self.tokens.grid, start, stop, self.step]


class RecentSteps(StatePart):
    """The last N steps."""

    def __init__(self, steps: int, shape: MemoryShape) -> None:
        self._shape = shape
        self.steps: deque[RecentStep] = deque(maxlen=steps)

    @staticmethod
    def declare(shape: MemoryShape) -> tuple[TensorSpec, ...]:
        """Declare their tokens, concatenated, and a row of numbers for each step."""
        token, wide, P = ("recent_token",), "embedding", shape.position_components
        return (
            TensorSpec(
                "recent.embeddings", (*token, wide), (None, None), shape.dtype, "recent steps as the model reads them"
            ),
            TensorSpec(
                "recent.positions", (*token, "component"), (None, P), torch.int64, "their stream positions", "position"
            ),
            TensorSpec(
                "recent.steps", ("recent_step", "field"), (None, FIELDS), torch.int64,
                "tokens, rows, columns, first visual token, the one after the last, step",
            ),
            TensorSpec(
                "recent.deepstack", ("vision_layer", "recent_visual_token", wide), (None, None, None), shape.dtype,
                "what is added to their visual tokens in the first layers", optional=True,
            ),
        )  # fmt: skip

    def live_tensors(self) -> dict[str, Tensor]:
        """Return all of them."""
        steps, P = self.steps, self._shape.position_components
        if not steps:
            return {
                "recent.embeddings": torch.zeros(0, 0, dtype=self._shape.dtype),
                "recent.positions": torch.zeros(0, P, dtype=torch.int64),
                "recent.steps": torch.zeros(0, FIELDS, dtype=torch.int64),
            }
        found = {
            "recent.embeddings": torch.cat([one.tokens.embeddings for one in steps]),
            "recent.positions": torch.cat([one.positions for one in steps]),
            "recent.steps": torch.tensor([one.fields for one in steps]),
        }
        deep = [one.tokens.deepstack for one in steps if one.tokens.deepstack is not None]
        return found | ({"recent.deepstack": torch.cat(deep, 1)} if deep else {})

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Check that the rows divide the tokens into steps."""
        rows = tensors["recent.steps"].tolist()
        sound = sum(row[0] for row in rows) == len(tensors["recent.embeddings"])
        if not sound or not all(0 <= first < last <= tokens for tokens, _, _, first, last, _ in rows):
            raise StateCorrupt("state: tensor recent.steps does not agree with the recent tokens")

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Take checked steps."""
        self.steps.clear()
        device = self._shape.device
        start = seen = 0
        deep = tensors.get("recent.deepstack")
        for tokens, height, width, first, last, step in tensors["recent.steps"].tolist():
            own, visual = slice(start, start + tokens), slice(seen, seen + last - first)
            read = StepTokens(
                tensors["recent.embeddings"][own].to(device, copy=True),
                (height, width),
                slice(first, last),
                None if deep is None else deep[:, visual].to(device, copy=True),
            )
            self.steps.append(RecentStep(read, tensors["recent.positions"][own].to(device, copy=True), step))
            start, seen = own.stop, visual.stop


class WithRecent(MemoryWithPart):
    """A memory and the last steps."""

    part: RecentSteps

    def __init__(self, inner: Memory, steps: int, shape: MemoryShape) -> None:
        super().__init__(inner, RecentSteps(steps, shape), RecentSteps.declare(shape))

    def observe(self, tokens: StepTokens, positions: Tensor, step: int) -> None:
        """Keep a step that was appended; the oldest one goes."""
        super().observe(tokens, positions, step)
        self.part.steps.append(RecentStep(tokens, positions, step))

    def prelude(self) -> Sequence[tuple[StepTokens, Tensor]]:
        """Return the last steps, oldest first."""
        return [(one.tokens, one.positions) for one in self.part.steps]

    def recall(self) -> Context:
        """Return the memory without the time of the recent steps."""
        context = super().recall()
        steps = self.part.steps
        return context.before(int(steps[0].positions[:, 0].min())) if steps else context

    def report(self) -> dict[str, Any]:
        """Return the memory's report, and how many tokens a question reads again."""
        return super().report() | {"recent_tokens": sum(len(one.positions) for one in self.part.steps)}
