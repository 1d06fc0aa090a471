"""A memory with another part of the state: `MemoryWithPart`, and `HybridMemory` for what other layers hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from protokv.core.context import Context
from protokv.core.hybrid import HybridState
from protokv.core.memory import Memory
from protokv.core.step import StepKV
from protokv.core.tensors import MemoryShape, StatePart, TensorSpec


class MemoryWithPart(Memory):
    """A memory (`inner`, empty at first), and another part of the state (`part`)."""

    def __init__(self, inner: Memory, part: StatePart, declared: tuple[TensorSpec, ...]) -> None:
        self.inner, self.part, self._declared = inner, part, declared
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

    def recall(self) -> Context:
        """Return what a question attends to in the memory."""
        return self.inner.recall()

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


class HybridMemory(MemoryWithPart):
    """A memory of the layers with full attention, and what the other layers carry."""

    part: HybridState

    def __init__(self, inner: Memory, shape: MemoryShape) -> None:
        super().__init__(inner, HybridState(shape), HybridState.declare(shape))

    def fork(self) -> HybridState:
        """Return what a forward may advance."""
        return self.part.fork()

    def advance(self, advanced: HybridState | None) -> None:
        """Keep what the forward of a step advanced."""
        assert advanced is not None
        advanced.settle(self.part)
        self.part = advanced

    def report(self) -> dict[str, Any]:
        """Return the memory's report, and the layers of the model."""
        return super().report() | self.part.report()
