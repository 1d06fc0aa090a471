"""Check steps and states: names, shapes, dtypes, and numbers that a stream can leave. States are untrusted input."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from protokv.core.sanitize import LARGEST
from protokv.core.step import MOST_COUNT
from protokv.core.tensors import SLOTS, Clock, MemoryShape, TensorSpec
from protokv.errors import StateCorrupt

if TYPE_CHECKING:
    from protokv.core.step import StepKV

MOST_NUMBER: Final = 4 * LARGEST
"""The largest number in a state: a difference of two keys or values of `LARGEST`, rotated."""


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
    """Check that all numbers are finite and within the bounds of `bounds_of`, before any of them is added up.

    Takes one pass over each tensor and one wait for the device.

    Raises:
        StateCorrupt: naming the tensor.
    """
    bounded = [spec for spec in specs if spec.name in tensors and tensors[spec.name].numel() and _is_bounded(spec)]
    if not bounded:
        return
    # In float64: exact for every whole number that is allowed, and for NaN.
    ends = [torch.stack(tensors[spec.name].aminmax()).double().cpu() for spec in bounded]
    for spec, (low, high) in zip(bounded, torch.stack(ends).tolist(), strict=True):
        if not (math.isfinite(low) and math.isfinite(high)):
            raise StateCorrupt(f"state: tensor {spec.name} holds a number that is not finite")
        least, most = bounds_of(spec, clock)
        if low < least or high > most:
            raise StateCorrupt(
                f"state: tensor {spec.name} holds {low:g} to {high:g}, the stream allows {least:g} to {most:g}"
            )


# Bits, bytes and codes in 8 bits mean something else in each memory, which checks them itself.
_WIDE: Final = (torch.int32, torch.int64)


def _is_bounded(spec: TensorSpec) -> bool:
    return bool(spec.unit) or spec.dtype.is_floating_point or spec.dtype in _WIDE


def bounds_of(spec: TensorSpec, clock: Clock | None) -> tuple[float, float]:
    """Return the least and the greatest number that a stream up to `clock` can leave in a tensor.

    | unit | least | greatest |
    |---|---|---|
    | tokens, slots | 0 | twice the tokens seen: one may open a slot twice, early and when it leaves the window |
    | position | 0 | the last position given |
    | step | -1 | the last step |
    | seconds | 0 | the stream time |
    | share of the image | 0 | 1, and rounding |
    | none, a float | -`MOST_NUMBER` | `MOST_NUMBER` |
    | none, an integer | -1 | `MOST_COUNT` |

    Without a clock, a stream is as long as a state can tell: `MOST_COUNT` tokens, positions, steps and seconds. In
    int32 there is room for one more step, of at most 2**24 tokens.
    """
    match spec.unit:
        case "tokens" | "slots":
            least, most = 0.0, 2.0 * (MOST_COUNT if clock is None else clock.tokens_seen)
        case "position":
            # An empty window holds zeros before the first position is given.
            least, most = 0.0, MOST_COUNT if clock is None else max(clock.next_position - 1, 0)
        case "step":
            least, most = -1.0, MOST_COUNT if clock is None else clock.steps - 1
        case "seconds":
            least, most = 0.0, MOST_COUNT if clock is None else clock.stream_time_s
        case "share of the image":
            least, most = 0.0, 1.0 + 1e-6
        case _:
            least, most = (-MOST_NUMBER, MOST_NUMBER) if spec.dtype.is_floating_point else (-1.0, MOST_COUNT)
    return least, most if spec.dtype != torch.int32 else min(most, 2**31 - 2**24)
