"""How a memory declares its state: `TensorSpec` for a tensor, `StatePart` for a holder of tensors.

A declaration is arithmetic on settings and on the sizes of the model (`MemoryShape`); it allocates nothing. What is
allocated, saved, checked on loading and counted in bytes follows from it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

import torch
from torch import Tensor

LAYER: Final = "layer"

# Axes whose entries are filled one after another; a saved state leaves out the unused ones (`protokv.core.packing`).
SLOTS: Final = (
    "near_token", "prototype", "kept_token", "residual", "thumbnail", "thumbnail_byte",
    "word_near_token", "word_prototype", "line_byte",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a state.

    Attributes:
        name: `group.name`.
        dims: what each axis counts, such as `("layer", "kv_head", "prototype", "feature")`.
        shape: size of each axis; None if it grows with the stream. Axes of one name have one size in all tensors.
        dtype: of its elements.
        meaning: what it holds, in a few words.
        unit: of its elements, for readers of a state.
        fill: the value before the stream begins, and in slots that are free again.
        optional: the tensor may be absent; it then holds `fill` throughout.
    """

    name: str
    dims: tuple[str, ...]
    shape: tuple[int | None, ...]
    dtype: torch.dtype
    meaning: str
    unit: str = ""
    fill: float = 0
    optional: bool = False

    @property
    def layer_axis(self) -> int | None:
        """The axis of the layers; None if the tensor is the same for all layers."""
        return self.dims.index(LAYER) if LAYER in self.dims else None

    @property
    def nbytes(self) -> int:
        """Its bytes; axes that grow count as 0."""
        return math.prod(size or 0 for size in self.shape) * self.dtype.itemsize

    def allocate(self, device: torch.device) -> Tensor:
        """Return the tensor before the stream begins; axes that grow have size 0."""
        return torch.full([size or 0 for size in self.shape], self.fill, dtype=self.dtype, device=device)


class StatePart(ABC):
    """Holds some tensors of a memory's state."""

    @abstractmethod
    def live_tensors(self) -> dict[str, Tensor]:
        """Return its tensors by name: the live ones, on any device, contiguous or not."""

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy its tensors out of a whole state, whose form was checked; by default into the live ones.

        Raises:
            StateCorrupt: a number that serves as an index is out of range; the tensor is named.
        """
        for name, held in self.live_tensors().items():
            held.copy_(tensors[name])

    def buffers(self) -> Mapping[str, Sequence[Tensor]]:
        """Return tensors that are not saved because the state determines them, by the group they are counted with."""
        return {}

    def nbytes(self) -> dict[str, int]:
        """Return bytes by group of tensors, buffers included."""
        held = ((name.partition(".")[0], count_bytes(tensor)) for name, tensor in self.live_tensors().items())
        return add_up(chain(held, ((group, count_bytes(*tensors)) for group, tensors in self.buffers().items())))


def add_up(sizes: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Return the sum of each group, in order of first appearance."""
    total: dict[str, int] = {}
    for group, size in sizes:
        total[group] = total.get(group, 0) + size
    return total


def count_bytes(*tensors: Tensor) -> int:
    """Return the bytes of some tensors together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


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
        layer_devices: device of each layer if a model is spread over several; None: all on `device`.
        part_of: number of layers of the whole model if these are only some of them; None: these are all.
        first_layer: index in the whole model of the first of these layers.
        frames_per_step: sampled frames that make a step.
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

    @property
    def of_model(self) -> tuple[int, slice]:
        """The number of layers of the whole model, and which of them these are."""
        return self.part_of or self.layers, slice(self.first_layer, self.first_layer + self.layers)
