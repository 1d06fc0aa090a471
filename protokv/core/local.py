"""`LocalMemory`: a memory whose state is on one device, declared once and held in parts.

Owns what follows from a declaration: what is saved, what is refused, what is counted. Knows no kind of memory.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from protokv.core.memory import Memory, MemoryShape, StepKV
from protokv.core.rotary import Rotary
from protokv.core.sanitize import Sanitizer
from protokv.core.slots import Slots
from protokv.core.tensors import Clock, StatePart, TensorSpec, add_up, check_shapes, check_values, shapes_of, unpack


class LocalMemory(Memory):
    """A memory in parts.

    Attributes:
        undivided: why its layers must all be on one device; empty: they need not.
    """

    undivided: ClassVar[str] = ""

    _slots: Slots

    def __init__(self, config: Any, shape: MemoryShape, rotary: Rotary) -> None:
        """An empty memory.

        Raises:
            ConfigError: the config does not fit the model.
        """
        self._config, self._shape, self._rotary = config, shape, rotary
        self._intake = Sanitizer(config, shape)

    @classmethod
    @abstractmethod
    def declare(cls, config: Any, shape: MemoryShape) -> tuple[TensorSpec, ...]:
        """The tensors of its state under these settings. Allocates nothing."""

    @abstractmethod
    def parts(self) -> Sequence[StatePart]:
        """Who holds its state."""

    def start(self, keys: Tensor, values: Tensor) -> None:
        """Take the prompt prefix."""
        self._slots.start(keys, values)

    def _admit(self, step: StepKV, last_step: int) -> StepKV:
        """The step as it may be taken, after step `last_step`.

        Raises:
            ValueError: its tensors do not fit, or its index is not above the last one.
            RuntimeError: the stream has not started.
            ModelError: it holds numbers that are not finite, and the settings say to refuse it.
        """
        self._slots.check_step(step, self._shape, last_step)
        return self._intake.admit(step)

    def specs(self) -> tuple[TensorSpec, ...]:
        """What its state consists of."""
        return self.declare(self._config, self._shape)

    def held(self) -> dict[str, Tensor]:
        """The whole state by name: live tensors, contiguous or not."""
        return {name: tensor for part in self.parts() for name, tensor in part.held().items()}

    def tensors(self) -> dict[str, Tensor]:
        """The whole state by name, contiguous. Some tensors are live: copy or write them before `append`."""
        return {name: tensor.contiguous() for name, tensor in self.held().items()}

    def load(self, tensors: Mapping[str, Tensor], clock: Clock | None = None) -> None:
        """Take a state that `tensors` gave, packed or whole, on any device. Nothing is changed when it is refused."""
        check_shapes(shapes_of(tensors), self.specs())
        tensors = unpack(tensors, self.specs())
        self._check(tensors, clock)
        self._take(tensors)

    def check(self, clock: Clock, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Refuse to go on with a state that no stream leaves."""
        self._check(self.held() if tensors is None else tensors, clock)

    def promises(self) -> list[str]:
        """What `check` holds the state to, a line each."""
        held = self.held()
        floats = sum(tensor.is_floating_point() for tensor in held.values())
        placed = [spec.name for spec in self.specs() if spec.unit and spec.name in held]
        return [
            f"values: finite in all {floats} tensors of floating-point numbers",
            f"places and counts: {', '.join(placed)} within the stream",
            *(part.promise for part in self.parts() if part.promise),
        ]

    def _check(self, tensors: Mapping[str, Tensor], clock: Clock | None) -> None:
        check_values(tensors, self.specs(), clock)
        for part in self.parts():
            part.check(tensors, clock)

    def _take(self, tensors: Mapping[str, Tensor]) -> None:
        for part in self.parts():
            part.take(tensors)

    def nbytes(self) -> dict[str, int]:
        """Bytes by part."""
        return add_up(sizes for part in self.parts() for sizes in part.nbytes().items())
