"""Check steps and states: names, shapes, dtypes, and numbers that a stream can leave. States are untrusted input."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from protokv.core.tensors import SLOTS, Clock, MemoryShape, TensorSpec, Unit
from protokv.errors import StateCorrupt

if TYPE_CHECKING:
    from protokv.core.step import StepKV


def check_step(step: StepKV, shape: MemoryShape) -> None:
    """Raise ValueError unless the tensors of a step fit the memory."""
    T = step.keys.shape[2]
    kv = (shape.layers, shape.kv_heads, T, shape.head_size)
    expected = {
        "keys": (kv, shape.dtype),
        "values": (kv, shape.dtype),
        "positions": ((T, shape.position_components), torch.int64),
        "coordinates": ((T, 2), torch.float32),
    }
    for name, (size, dtype) in expected.items():
        tensor: Tensor = getattr(step, name)
        if tensor.shape != size or tensor.dtype != dtype or T == 0:
            raise ValueError(
                f"step {step.step}: {name} must be {list(size)} {dtype} with T > 0, "
                f"got {list(tensor.shape)} {tensor.dtype}"
            )


def check_shapes(found: Mapping[str, tuple[Sequence[int], torch.dtype]], specs: Iterable[TensorSpec]) -> None:
    """Check that a state has the declared names, shapes and dtypes, without reading a tensor.

    An axis of `SLOTS` may be shorter than declared if it is so in all tensors that have it.

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


def check_values(tensors: Mapping[str, Tensor], specs: Iterable[TensorSpec], clock: Clock | None) -> None:
    """Check that all numbers are finite and within the bounds of their unit.

    Takes one pass over each tensor and one wait for the device.

    Raises:
        StateCorrupt: naming the tensor.
    """
    bounded = [
        spec
        for spec in specs
        if spec.name in tensors and tensors[spec.name].numel() and (spec.dtype.is_floating_point or spec.unit)
    ]
    if not bounded:
        return
    # In float64: exact for every whole number that a stream can reach, and for NaN.
    ends = [torch.stack(tensors[spec.name].aminmax()).double().cpu() for spec in bounded]
    for spec, (low, high) in zip(bounded, torch.stack(ends).tolist(), strict=True):
        if not (math.isfinite(low) and math.isfinite(high)):
            raise StateCorrupt(f"state: tensor {spec.name} holds a number that is not finite")
        least, most = _bounds_of(spec.unit, clock)
        if low < least or high > most:
            raise StateCorrupt(
                f"state: tensor {spec.name} holds {low:g} to {high:g}, the stream allows {least:g} to {most:g}"
            )


def _bounds_of(unit: Unit, clock: Clock | None) -> tuple[float, float]:
    if unit == "share of the image":
        return 0.0, 1.0 + 1e-6
    if unit == "position":
        # An empty window holds zeros before the first position is given.
        return 0.0, math.inf if clock is None else max(clock.next_position - 1, 0)
    if unit == "step":
        return -1.0, math.inf if clock is None else clock.steps - 1
    return (0.0, math.inf) if unit == "tokens" else (-math.inf, math.inf)
