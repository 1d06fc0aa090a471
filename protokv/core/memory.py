"""What every memory is: bounded state with the verbs `append`, `context` and `tensors`.

Owns the interface `Memory` and its inputs (`StepKV`, `MemoryShape`). Knows nothing of models, files or sessions. A
memory is handed keys as the model rotated them, and hands back a `Context`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from protokv.core.context import Context
from protokv.core.tensors import Clock, TensorSpec


@dataclass(frozen=True, slots=True)
class MemoryShape:
    """What a memory must know of the model.

    Attributes:
        layers: L.
        kv_heads: H, after grouped-query attention.
        head_size: D.
        position_components: P, 1 for RoPE and 3 for M-RoPE.
        sink_tokens: P0, tokens of the prompt prefix; may be 0.
        dtype: of keys and values.
        device: of all tensors, unless `layer_devices` says otherwise.
        layer_devices: device of each layer where a model is spread over several; None: all on `device`.
        part_of: the whole model's layers where these are some of its consecutive ones, and the first of them is
            `first_layer`; None: they are all.
        first_layer: see `part_of`.
        frames_per_step: sampled frames that make a step.
        streams: streams of one model whose heads stand one behind the other among the `kv_heads`. What is drawn at
            random is the same for each of them, as if it were alone.
    """

    layers: int
    kv_heads: int
    head_size: int
    position_components: int
    sink_tokens: int
    dtype: torch.dtype
    device: torch.device
    layer_devices: Sequence[torch.device] | None = None
    part_of: int | None = None
    first_layer: int = 0
    frames_per_step: int = 1
    streams: int = 1

    @property
    def of_model(self) -> tuple[int, slice]:
        """How many layers the whole model has, and which of them these are."""
        return self.part_of or self.layers, slice(self.first_layer, self.first_layer + self.layers)


@dataclass(frozen=True, slots=True)
class StepKV:
    """Keys and values of one step, in raster order.

    Attributes:
        keys: `[L, H, T, D]` model dtype, rotated as the model made them.
        values: `[L, H, T, D]` model dtype.
        positions: `[T, P]` int64, stream positions.
        coordinates: `[T, 2]` float32, `(x, y)` of the cell centres in [0, 1].
        step: index of the step, increasing.
        usable: `[T]` bool, which tokens may be taken; None: that is not known yet (`protokv.core.sanitize`).
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    coordinates: Tensor
    step: int
    usable: Tensor | None = None

    def usable_only(self) -> StepKV:
        """The step without the tokens that may not be taken; this waits for the device."""
        if self.usable is None:
            return self
        kept = self.usable.nonzero().squeeze(1)
        return StepKV(
            self.keys[:, :, kept], self.values[:, :, kept], self.positions[kept], self.coordinates[kept], self.step
        )

    def check(self, shape: MemoryShape) -> None:
        """Raise ValueError unless the tensors fit the memory."""
        T = self.keys.shape[2]
        kv = (shape.layers, shape.kv_heads, T, shape.head_size)
        expected = {
            "keys": (kv, shape.dtype),
            "values": (kv, shape.dtype),
            "positions": ((T, shape.position_components), torch.int64),
            "coordinates": ((T, 2), torch.float32),
        }
        for name, (size, dtype) in expected.items():
            tensor: Tensor = getattr(self, name)
            if tensor.shape != size or tensor.dtype != dtype or T == 0:
                raise ValueError(
                    f"step {self.step}: {name} must be {list(size)} {dtype} with T > 0, "
                    f"got {list(tensor.shape)} {tensor.dtype}"
                )


class Memory(ABC):
    """State of a stream. One memory serves all layers and KV heads of a model.

    Attributes:
        bounded: whether its bytes stop growing; a reference that keeps everything says that it does not.
        hides_recent: whether what it recalls can be shown without the last steps, which are then read afresh.
        joins_steps: whether a step may read the steps before it while they are not appended yet; not where each is
            encoded by itself.
    """

    bounded: bool = True
    hides_recent: bool = True
    joins_steps: bool = True

    @abstractmethod
    def start(self, keys: Tensor, values: Tensor) -> None:
        """Take the prompt prefix, `[L, H, P0, D]` each: exact, always kept. Once, before any step."""

    def select(self, features: Tensor, grid: tuple[int, int]) -> Tensor | None:
        """Which visual tokens of the next step are forwarded at all; for most memories all of them.

        Called once a step and in order, before the model reads it. A memory that compares steps may keep features:
        they are part of its state.

        Args:
            features: `[V, E]` model dtype, visual tokens in raster order as the language model would take them.
            grid: rows and columns of these, `V` together.

        Returns:
            Indices `[n]` int64 into the features, increasing, at least one; None: all.
        """
        return None

    def probes_for(self, tokens: int) -> Sequence[str]:
        """Texts whose queries `compact` wants before a step of this many tokens is appended; for most memories none."""
        return ()

    def compact(self, queries: Sequence[Tensor], tokens: int) -> None:
        """Make room for a step, by what some texts look for. Only after `probes_for`, and before the step.

        Args:
            queries: of each text, `[L, Hq, t, D]`, rotated to where a question would stand.
            tokens: of the step.
        """
        raise RuntimeError("this memory makes room by itself")

    @abstractmethod
    def append(self, step: StepKV) -> None:
        """Take one step of the stream."""

    @abstractmethod
    def context(self) -> Context:
        """What a new step attends to. Changes no state; the tensors are live, valid until `append`."""

    def recall(self) -> Context:
        """What a question attends to; for most memories the same. Changes no state, as `context`."""
        return self.context()

    @abstractmethod
    def specs(self) -> tuple[TensorSpec, ...]:
        """What its state consists of."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The whole state by name, contiguous. Some tensors are live: copy or write them before `append`."""

    @abstractmethod
    def load(self, tensors: Mapping[str, Tensor], clock: Clock | None = None) -> None:
        """Take a state that `tensors` gave, packed or whole, on any device. Nothing is changed when it is refused.

        Args:
            tensors: the whole state.
            clock: where the stream stands, which `check` would hold it against; None where that is not known.

        Raises:
            StateCorrupt: a tensor is missing, unknown, of a wrong shape or dtype, or holds what no stream can
            leave.
        """

    @abstractmethod
    def check(self, clock: Clock, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Refuse to go on with a state that no stream leaves: numbers that are not finite, places beyond the stream,
        counters that contradict each other or the clock. Cheap enough to run before each commit: one pass over the
        state, and a few waits for the device.

        Args:
            clock: where the stream stands.
            tensors: what `tensors` gave just now, where that is at hand.

        Raises:
            StateCorrupt: naming the tensor.
        """

    @abstractmethod
    def promises(self) -> list[str]:
        """What `check` holds the state to, a line each."""

    @abstractmethod
    def nbytes(self) -> dict[str, int]:
        """Bytes by part."""

    @property
    def bytes_held(self) -> int:
        """Bytes of all parts."""
        return sum(self.nbytes().values())

    @property
    def most_bytes(self) -> int | None:
        """Bytes of the tensors of its state at the most; None where they grow with the stream."""
        return sum(spec.nbytes for spec in self.specs()) if self.bounded else None

    @abstractmethod
    def report(self) -> dict[str, Any]:
        """Plain numbers about the state, JSON-able."""
