"""`Memory`: bounded state with the verbs `append`, `context` and `tensors`; `SingleDeviceMemory`,
in declared parts.

A memory takes keys as the model rotated them and returns a `Context`. Knows no model, file or
session.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Generic

from torch import Tensor
from typing_extensions import TypeVar

from protokv.core.context import Context
from protokv.core.near import NearWindow
from protokv.core.packing import restore_unused_slots
from protokv.core.rotary import Rotary
from protokv.core.sanitize import StepSanitizer
from protokv.core.slots import KVSlots
from protokv.core.step import Grid, StepKV
from protokv.core.tensors import (
    MemoryShape,
    Specs,
    StateTensors,
    TensorDict,
    Tensors,
    sum_by_group,
)
from protokv.device.runs import Plan, Runs, catch_up
from protokv.texts import JsonObject

ConfigT = TypeVar("ConfigT", default=Any)
"""The settings of a memory: a `MemoryConfig`, which this file does not know."""


class Memory(ABC):
    """State of a stream. One memory serves all layers and KV heads of a model."""

    # whether its bytes stop growing; False for a reference that keeps everything
    bounded: bool = True
    # whether what `recall` shows depends on the question, so that nothing of it can be hidden
    # before the question is known
    retrieves: bool = False
    reads_queries: bool = False  # whether a step comes with the queries that forwarded it
    # whether a step is forwarded only when the memory has all steps before it
    one_by_one: bool = False
    # what `context` shows besides the data of tensors that stay where they are; None: it differs
    # each time
    context_key: Hashable = None
    runs: Runs | None = None  # how its steps were taken; None: nothing is known

    @abstractmethod
    def start(self, keys: Tensor, values: Tensor) -> None:
        """Take the prompt prefix, `[L, H, P0, D]` each: kept exactly for ever. Once, before any
        step.
        """

    def select(self, features: Tensor, grid: Grid) -> Tensor | None:
        """Choose the visual tokens of the next step that are forwarded at all; by default all of
        them.

        Called once a step and in order, before the model reads it. Features are `[V, E]` model
        dtype in raster order, of a grid of rows and columns. Returned are indices `[n]` int64 into
        them, increasing, at least one; None: all.
        """
        return None

    @abstractmethod
    def append(self, step: StepKV) -> None:
        """Take one step of the stream."""

    @abstractmethod
    def context(self) -> Context:
        """Return what a new step attends to. Changes no state; the tensors are live, valid until
        `append`.
        """

    def recall(self) -> Context:
        """Return what a question attends to; by default `context()`."""
        return self.context()

    @abstractmethod
    def specs(self) -> Specs:
        """Return the declaration of its state."""

    @abstractmethod
    def tensors(self) -> TensorDict:
        """Return the whole state by name, contiguous. Some tensors are live: copy or write them
        before `append`.
        """

    @abstractmethod
    def load(self, tensors: Tensors) -> None:
        """Take a state that `tensors` gave, packed or whole, on any device, into this empty memory.

        Its names, shapes and dtypes are checked already (`core.build.restore_memory`).
        StateCorrupt: a tensor holds an index out of range; this memory is then of no use.
        """

    @abstractmethod
    def nbytes(self) -> dict[str, int]:
        """Return bytes by part."""

    @property
    def bytes_held(self) -> int:
        """Bytes of all parts."""
        return sum(self.nbytes().values())

    @property
    def most_bytes(self) -> int | None:
        """The most bytes that the tensors of its state can take; None if they grow with the
        stream.
        """
        return sum(spec.nbytes for spec in self.specs()) if self.bounded else None

    @abstractmethod
    def report(self) -> JsonObject:
        """Return plain numbers about the state, JSON-able."""


class SingleDeviceMemory(Memory, Generic[ConfigT]):
    """A memory on one device, whose state is declared once and held in `parts`."""

    undivided: ClassVar[str] = ""  # why its layers must all be on one device; empty: they need not
    _slots: KVSlots
    _near: NearWindow

    def __init__(self, config: ConfigT, shape: MemoryShape, rotary: Rotary) -> None:
        """Make an empty memory. ConfigError: the config does not fit the model."""
        self._config = config
        self._shape = shape
        self._rotary = rotary
        self._sanitizer = StepSanitizer(shape)
        self.runs: Runs = Runs(shape.device)

    @classmethod
    def declare(cls, config: ConfigT, shape: MemoryShape) -> Specs:
        """Return the tensors of its state under these settings; a subclass adds its own. Allocates
        nothing.
        """
        return (*KVSlots.declare(shape), *StepSanitizer.declare())

    def parts(self) -> Sequence[StateTensors]:
        """Return the holders of its state, when it has taken the last step."""
        catch_up(self._shape.device)
        return self._slots, self._sanitizer

    def start(self, keys: Tensor, values: Tensor) -> None:
        """Take the prompt prefix."""
        self._slots.start(keys, values)

    def mark_repeats(self, step: StepKV) -> Tensor | None:
        """Return `StepKV.repeats` of the next step; None if this memory does not look."""
        return None

    @property
    def last_step(self) -> int:
        """The index of the last step seen; -1: none."""
        return self._near.last_step

    def append(self, step: StepKV) -> None:
        """Take one step: plan it on the host, and apply the plan to it on the device.

        Plans of one key are the same operations on tensors of one size, so that a device may run
        them again as it ran the first (`Runs.carry_out`); what differs is in the numbers of a plan.
        A device may run this beside what is launched after it. `catch_up` waits for that, and who
        reads the memory calls it.
        """
        if not self._slots.started:
            raise RuntimeError(
                "the memory needs its prompt prefix before the first step: call start()"
            )
        if step.step <= self.last_step:
            raise ValueError(
                f"step {step.step} came after step {self.last_step}; indices must increase from 0"
            )
        plan = self.plan(step)

        def take(
            numbers: Tensor, keys: Tensor, values: Tensor, positions: Tensor, places: Tensor
        ) -> None:
            same = replace(step, keys=keys, values=values, positions=positions, coordinates=places)
            self.apply(plan.key, numbers, self._sanitizer.admit(same))

        self.runs.carry_out(
            "update", plan, take, step.keys, step.values, step.positions, step.coordinates
        )

    def plan(self, step: StepKV) -> Plan:
        """Return what taking a step comes to, on the host alone; nothing for a memory that asks the
        device.
        """
        return Plan()

    @abstractmethod
    def apply(self, key: Any, numbers: Tensor, step: StepKV) -> None:
        """Take a planned step, whose `usable` is known, given key and numbers of the plan.
        Unless it asks the device, this is tensors alone: the same operations for every plan of a
        key.
        """

    def specs(self) -> Specs:
        """Return the declaration of its state."""
        return self.declare(self._config, self._shape)

    def live_tensors(self) -> TensorDict:
        """Return the whole state by name: live tensors, contiguous or not."""
        return {
            name: tensor for part in self.parts() for name, tensor in part.live_tensors().items()
        }

    def tensors(self) -> TensorDict:
        """Return the whole state by name, contiguous."""
        return {name: tensor.contiguous() for name, tensor in self.live_tensors().items()}

    def load(self, tensors: Tensors) -> None:
        """Take a state whose form is checked."""
        tensors = restore_unused_slots(tensors, self.specs())
        for part in self.parts():
            part.take(tensors)

    def report(self) -> JsonObject:
        """Return the number of tokens dropped, and what is to be said of each layer."""
        catch_up(self._shape.device)
        return {"tokens_dropped": int(self._sanitizer.dropped), "layers": []}

    def nbytes(self) -> dict[str, int]:
        """Return bytes by part."""
        return sum_by_group(sizes for part in self.parts() for sizes in part.nbytes().items())
