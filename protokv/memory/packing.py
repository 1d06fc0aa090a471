"""A state without the slots that nothing was put into yet: what is saved grows with use until the memory is full.

The bytes in memory are the same for the life of a stream, and the bytes on disk never exceed them. But a clip of ten
seconds fills a hundredth of the default budget, and its state would be a file of zeros. So of every axis in `SLOTS`
the entries at its end are left out that hold `TensorSpec.fill` in all tensors that have the axis, bit for bit: packing
loses nothing, and the same state packs to the same bytes. Once the last slot is in use nothing is left out, and
finding that out costs a look at one entry. Knows no memory, and no files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import torch
from torch import Tensor

from protokv.memory.state import SLOTS, TensorSpec

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
