"""How a memory declares its state: one `TensorSpec` a tensor, and `StatePart`, who holds some of them.

A declaration is arithmetic on settings and the sizes of the model: nothing is allocated for it. From it follow what is
allocated, what a state must look like to be loaded, which axis has the layers where a model is spread over devices, and
the names of dimensions in formats that have them. Knows no memory.

A state without the slots that nothing was put into yet: what is saved grows with use until the memory is full.

The bytes in memory are the same for the life of a stream, and the bytes on disk never exceed them. But a clip of ten
seconds fills a hundredth of the default budget, and its state would be a file of zeros. So of every axis in `SLOTS`
the entries at its end are left out that hold `TensorSpec.fill` in all tensors that have the axis, bit for bit: packing
loses nothing, and the same state packs to the same bytes. Once the last slot is in use nothing is left out, and
finding that out costs a look at one entry. Knows no memory, and no files.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar, Final, Literal, Protocol

import torch
from torch import Tensor

from protokv.errors import StateCorrupt

Unit = Literal["", "tokens", "position", "step", "share of the image"]

LAYER: Final = "layer"

# Axes whose entries are filled one after the other; a saved state leaves out what is unused (`protokv.core.tensors`).
SLOTS: Final = ("near_token", "prototype", "kept_token", "residual", "planned_merge")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a state.

    Attributes:
        name: `group.name`.
        dims: what each axis counts, such as `("layer", "kv_head", "prototype", "feature")`.
        shape: size of each axis; None where it grows with the stream. Axes of one name have one size in all tensors.
        dtype: of its elements.
        meaning: what it holds, in a few words.
        unit: of its elements. It also says what they may be: a position is below the one that comes next, a step below
            the number of steps (-1: none), a share of the image from 0 to 1.
        fill: what it holds before the stream begins, and where a head has no use for it any more.
        optional: it may be absent, which says that it holds `fill` and nothing else.
    """

    name: str
    dims: tuple[str, ...]
    shape: tuple[int | None, ...]
    dtype: torch.dtype
    meaning: str
    unit: Unit = ""
    fill: float = 0
    optional: bool = False

    @property
    def layer_axis(self) -> int | None:
        """The axis of the layers; None where the tensor is the same for all layers."""
        return self.dims.index(LAYER) if LAYER in self.dims else None

    @property
    def group(self) -> str:
        """The first part of its name."""
        return self.name.partition(".")[0]

    @property
    def nbytes(self) -> int:
        """Its bytes; what grows counts as nothing."""
        return math.prod(size or 0 for size in self.shape) * self.dtype.itemsize

    def allocate(self, device: torch.device) -> Tensor:
        """The tensor before the stream begins; axes that grow have size 0."""
        return torch.full([size or 0 for size in self.shape], self.fill, dtype=self.dtype, device=device)


class Clock(Protocol):
    """Where a stream stands, as far as a memory can be held against it; `protokv.core.records.StreamClock` is one."""

    @property
    def steps(self) -> int:
        """Steps watched."""

    @property
    def tokens_seen(self) -> int:
        """Visual tokens in them."""

    @property
    def next_position(self) -> int:
        """Stream position of the token that comes next."""


class StatePart(ABC):
    """Who holds some tensors of a memory's state.

    Attributes:
        promise: what `check` holds a state to, in one line for people; empty where it has nothing to say.
    """

    promise: ClassVar[str] = ""

    @abstractmethod
    def held(self) -> dict[str, Tensor]:
        """Its part of the state by name: live tensors, on any device, contiguous or not."""

    @abstractmethod
    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Take a whole state that was checked, copying its part of it."""

    def check(self, tensors: Mapping[str, Tensor], clock: Clock | None) -> None:
        """Refuse a whole state that no stream leaves; shapes, dtypes and units are checked. Cheap: it runs before each
        commit.

        Args:
            tensors: the state, this memory's or one that is to be taken. Nothing of `self` is looked at but settings.
            clock: where the stream stands; None where that is not known.

        Raises:
            StateCorrupt: naming the tensor.
        """
        return

    def buffers(self) -> Mapping[str, Sequence[Tensor]]:
        """What it holds besides and can make again from the state, by the group of tensors that it goes with."""
        return {}

    def nbytes(self) -> dict[str, int]:
        """Bytes by group of tensors, buffers included."""
        held = ((name.partition(".")[0], size_of(tensor)) for name, tensor in self.held().items())
        return add_up(chain(held, ((group, size_of(*tensors)) for group, tensors in self.buffers().items())))


def add_up(sizes: Iterable[tuple[str, int]]) -> dict[str, int]:
    """The sum of each group, in order of first appearance."""
    total: dict[str, int] = {}
    for group, size in sizes:
        total[group] = total.get(group, 0) + size
    return total


def size_of(*tensors: Tensor) -> int:
    """Bytes of the tensors together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def check_shapes(found: Mapping[str, tuple[Sequence[int], torch.dtype]], specs: Iterable[TensorSpec]) -> None:
    """Refuse a state unless it has the declared names, shapes and dtypes. Needs no tensor.

    An axis of `SLOTS` may have fewer entries than declared, the same in all tensors that have it.

    Raises:
        StateCorrupt: naming the first tensor that is missing, unknown or different.
    """
    sizes: dict[str, tuple[int, str]] = {}
    declared = {spec.name: spec for spec in specs}
    for name, spec in declared.items():
        if name not in found:
            if spec.optional:
                continue
            raise StateCorrupt(f"state: tensor {name} is missing")
        shape, dtype = found[name]
        fits = len(shape) == len(spec.shape) and dtype == spec.dtype
        if not fits or not all(map(_may_have, spec.dims, spec.shape, shape)):
            axes = zip(spec.dims, spec.shape, strict=True)
            wanted = ", ".join(dim if size is None else str(size) for dim, size in axes)
            raise StateCorrupt(f"state: tensor {name} must be [{wanted}] {spec.dtype}, got {list(shape)} {dtype}")
        for dim, want, size in zip(spec.dims, spec.shape, shape, strict=True):
            if (want is None or dim in SLOTS) and sizes.setdefault(dim, (size, name))[0] != size:
                first, other = sizes[dim]
                raise StateCorrupt(f"state: tensor {name} must have {first} {dim} entries as {other} has, got {size}")
    for name in found:
        if name not in declared:
            raise StateCorrupt(f"state: tensor {name} is unknown to this memory")


def _may_have(dim: str, want: int | None, size: int) -> bool:
    return want is None or size == want or (dim in SLOTS and size < want)


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each tensor."""
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def check_values(tensors: Mapping[str, Tensor], specs: Iterable[TensorSpec], clock: Clock | None) -> None:
    """Refuse a state with a number that is not finite, or that its unit does not allow.

    One pass over each tensor and one wait for a device, at the end of all.

    Raises:
        StateCorrupt: naming the tensor.
    """
    seen = [spec for spec in specs if spec.name in tensors and tensors[spec.name].numel() and _is_bounded(spec)]
    if not seen:
        return
    # In float64: exact for every whole number that a stream can reach, and for NaN.
    ends = [torch.stack(tensors[spec.name].aminmax()).double().cpu() for spec in seen]
    for spec, (low, high) in zip(seen, torch.stack(ends).tolist(), strict=True):
        if not (math.isfinite(low) and math.isfinite(high)):
            raise StateCorrupt(f"state: tensor {spec.name} holds a number that is not finite")
        least, most = _span_of(spec.unit, clock)
        if low < least or high > most:
            raise StateCorrupt(
                f"state: tensor {spec.name} holds {low:g} to {high:g}, the stream allows {least:g} to {most:g}"
            )


def _is_bounded(spec: TensorSpec) -> bool:
    return spec.dtype.is_floating_point or spec.unit != ""


def _span_of(unit: Unit, clock: Clock | None) -> tuple[float, float]:
    if unit == "share of the image":
        return 0.0, 1.0 + 1e-6
    if unit == "position":
        # An empty window holds zeros before the first position is given.
        return 0.0, math.inf if clock is None else max(clock.next_position - 1, 0)
    if unit == "step":
        return -1.0, math.inf if clock is None else clock.steps - 1
    return (0.0, math.inf) if unit == "tokens" else (-math.inf, math.inf)


_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def pack(tensors: Mapping[str, Tensor], specs: Iterable[TensorSpec]) -> dict[str, Tensor]:
    """The tensors of a whole state without unused slots, contiguous; those that lose nothing are the same tensors."""
    declared = [spec for spec in specs if spec.name in tensors]
    packed = dict(tensors)
    for slot in SLOTS:
        having = [spec for spec in declared if slot in spec.dims and spec.shape[spec.dims.index(slot)] is not None]
        # The smallest first: mostly the last entry of one of them tells that all slots are in use.
        having.sort(key=lambda spec: tensors[spec.name].numel())
        used = 0
        for spec in having:
            used = _used(packed[spec.name], spec, spec.dims.index(slot), used)
        for spec in having:
            packed[spec.name] = packed[spec.name].narrow(spec.dims.index(slot), 0, used).contiguous()
    return packed


def unpack(tensors: Mapping[str, Tensor], specs: Iterable[TensorSpec]) -> dict[str, Tensor]:
    """The inverse of `pack`; the tensors fit the specs (`check_shapes`). Whole ones are not copied."""
    whole = dict(tensors)
    for spec in specs:
        found = tensors.get(spec.name)
        if found is None or all(want in (None, size) for want, size in zip(spec.shape, found.shape, strict=True)):
            continue
        wanted = [size if want is None else want for want, size in zip(spec.shape, found.shape, strict=True)]
        full = torch.full(wanted, spec.fill, dtype=spec.dtype, device=found.device)
        full[tuple(slice(0, size) for size in found.shape)] = found
        whole[spec.name] = full
    return whole


def _used(tensor: Tensor, spec: TensorSpec, axis: int, at_least: int) -> int:
    """How many entries of an axis are needed so that those behind them hold nothing but `fill`; `at_least` are."""
    size = tensor.shape[axis]
    bits = _BITS[tensor.element_size()]
    fill = torch.full((1,), spec.fill, dtype=spec.dtype, device=tensor.device).view(bits)
    entries = tensor.view(bits).movedim(axis, 0)
    if at_least == size or bool((entries[size - 1] != fill).any()):
        return size
    others = tuple(range(1, entries.ndim))
    differing = entries[at_least:] != fill
    (needed,) = (differing.any(others) if others else differing).nonzero(as_tuple=True)
    return at_least + (int(needed[-1]) + 1 if len(needed) else 0)
