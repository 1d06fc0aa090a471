"""How a memory declares its state: `TensorSpec` for a tensor, `StateTensors` for a holder of
tensors.

A declaration is arithmetic on settings and on the sizes of the model (`MemoryShape`); it allocates
nothing. What is allocated, saved, checked on loading and counted in bytes follows from it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]
"""Tensors by their names in a state."""
TensorDict = dict[str, Tensor]
"""Tensors by their names in a state, in a dict that who gets it may change."""
TensorGroups = Mapping[str, Sequence[Tensor]]
"""Tensors by the group that they are counted with."""

LAYER = "layer"

# Axes whose entries are filled one after another; a saved state leaves out the unused ones
# (`protokv.core.packing`).
SLOTS = (
    "near_token",
    "prototype",
    "kept_token",
    "residual",
    "thumbnail",
    "thumbnail_byte",
    "word_near_token",
    "word_prototype",
    "line_byte",
)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a state. Axes of one name have one size in all tensors."""

    name: str  # `group.name`
    # the thing that each axis counts, such as `("layer", "kv_head", "prototype", "feature")`
    dims: tuple[str, ...]
    shape: tuple[int | None, ...]  # size of each axis; None if it grows with the stream
    dtype: torch.dtype
    meaning: str  # its contents, in a few words
    unit: str = ""  # unit of its elements, for readers of a state
    fill: float = 0  # the value before the stream begins, and in slots that are free again
    optional: bool = False  # whether it may be absent; it then holds `fill` throughout

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
        return torch.full(
            [size or 0 for size in self.shape], self.fill, dtype=self.dtype, device=device
        )


Specs = tuple[TensorSpec, ...]
"""Declarations of the tensors of a state."""


@dataclass(frozen=True, slots=True)
class Axes:
    """The sizes of axes by their names; None: it grows with the stream."""

    sizes: Mapping[str, int | None]

    def declare(
        self,
        name: str,
        dims: str,
        dtype: torch.dtype,
        meaning: str,
        unit: str = "",
        fill: float = 0,
        *,
        optional: bool = False,
    ) -> TensorSpec:
        """Declare a tensor; `dims` are the names of its axes, with spaces between them."""
        names = tuple(dims.split())
        sizes = tuple(self.sizes[axis] for axis in names)
        return TensorSpec(name, names, sizes, dtype, meaning, unit, fill, optional)


class StateTensors(ABC):
    """Holds some tensors of a memory's state."""

    @abstractmethod
    def live_tensors(self) -> TensorDict:
        """Return its tensors by name: the live ones, on any device, contiguous or not."""

    def take(self, tensors: Tensors) -> None:
        """Copy its tensors out of a whole state, whose form was checked; by default into the live
        ones.

        StateCorrupt: a number that serves as an index is out of range; the tensor is named.
        """
        for name, held in self.live_tensors().items():
            held.copy_(tensors[name])

    def buffers(self) -> TensorGroups:
        """Return tensors that are not saved because the state determines them, by the group they
        are counted with.
        """
        return {}

    def nbytes(self) -> dict[str, int]:
        """Return bytes by group of tensors, buffers included."""
        sizes = [
            (name.partition(".")[0], count_bytes(tensor))
            for name, tensor in self.live_tensors().items()
        ]
        sizes += [(group, count_bytes(*tensors)) for group, tensors in self.buffers().items()]
        return sum_by_group(sizes)


def sum_by_group(sizes: Iterable[tuple[str, int]]) -> dict[str, int]:
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
    """What a memory must know of the model."""

    layers: int  # L
    kv_heads: int  # H, after grouped-query attention
    head_size: int  # D
    position_components: int  # P, 1 for RoPE and 3 for M-RoPE
    sink_tokens: int  # P0, tokens of the prompt prefix; may be 0
    dtype: torch.dtype  # dtype of keys and values
    device: torch.device  # device of all tensors, unless `layer_devices` says otherwise
    # device of each layer of a model spread over several; None: `device`
    layer_devices: Sequence[torch.device] | None = None
    # whether each layer rotates its keys; None: all do
    rotated: Sequence[bool] | None = None
    part_of: int | None = None  # number of layers of the whole model if these are only some of them
    first_layer: int = 0  # index in the whole model of the first of these layers
    frames_per_step: int = 1  # sampled frames that make a step

    @property
    def model_layers(self) -> int:
        """The number of layers of the whole model."""
        return self.part_of or self.layers

    def axes(self, **others: int | None) -> Axes:
        """Return the axes of the model, and others of these sizes."""
        own = {
            LAYER: self.layers,
            "kv_head": self.kv_heads,
            "feature": self.head_size,
            "component": self.position_components,
        }
        return Axes({**own, **others})

    @property
    def own_layers(self) -> slice:
        """Which of the layers of the whole model these are."""
        return slice(self.first_layer, self.first_layer + self.layers)
