"""The form of saved tensors: check it against the declaration, and leave unused slots out.

A memory has the same bytes for the life of a stream, but a clip of ten seconds fills a hundredth of
the default budget and should make a small file. For every axis in `SLOTS` the entries at its end
are left out that hold `TensorSpec.fill` in all tensors with that axis, bit for bit: packing loses
nothing, and equal states pack to equal bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from protokv.core.sanitize import LARGEST_NUMBER
from protokv.core.tensors import SLOTS, TensorDict, Tensors, TensorSpec
from protokv.errors import StateCorrupt

# The integer dtype of each element size: comparing as integers tells -0.0 from 0.0 and one NaN from
# another.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_tensor_shapes(found: Tensors, specs: Iterable[TensorSpec]) -> None:
    """Check that a state has the declared names, shapes and dtypes, and numbers as a stream leaves
    them: finite, and at most `LARGEST_NUMBER`.

    An axis of `SLOTS` may be shorter than declared if it is so in all tensors that have it.
    StateCorrupt: naming the first tensor that is missing, unknown or different.
    """
    sizes: dict[str, int] = {}
    declared = {spec.name: spec for spec in specs}
    for name, spec in declared.items():
        if name not in found:
            if spec.optional:
                continue
            raise StateCorrupt(f"state: tensor {name} is missing")
        shape = list(found[name].shape)
        dtype = found[name].dtype
        axes = list(zip(spec.dims, spec.shape, shape, strict=False))
        fits = all(
            want in (None, size) or (dim in SLOTS and size < want) for dim, want, size in axes
        )
        if not fits or len(shape) != len(spec.shape) or dtype != spec.dtype:
            wanted = ", ".join(
                dim if size is None else str(size)
                for dim, size in zip(spec.dims, spec.shape, strict=True)
            )
            raise StateCorrupt(
                f"state: tensor {name} must be [{wanted}] {spec.dtype}, got {shape} {dtype}"
            )
        if dtype.is_floating_point and all(shape):
            least, most = found[name].aminmax()
            # A comparison with NaN is false. What a merge costs is infinite where none is possible.
            bound = math.inf if name == "rule.cost" else LARGEST_NUMBER
            if not -bound <= least <= most <= bound:
                raise StateCorrupt(f"state: tensor {name} holds numbers that no stream leaves")
        for dim, want, size in axes:
            if (want is None or dim in SLOTS) and sizes.setdefault(dim, size) != size:
                raise StateCorrupt(
                    f"state: tensor {name} must have {sizes[dim]} {dim} entries, got {size}"
                )
    for name in found.keys() - declared.keys():
        raise StateCorrupt(f"state: tensor {name} is unknown to this memory")


def check_steps(tensors: Tensors, specs: Iterable[TensorSpec], steps: int) -> None:
    """Check that no tensor knows a step that a stream of so many `steps` has not seen.
    StateCorrupt.
    """
    for spec in specs:
        known = tensors.get(spec.name, torch.empty(0))
        if spec.name.endswith((".ring", "kept.count")):
            known = known[-1:]  # counters, and last the newest step
        elif spec.unit != "step":
            continue
        if known.numel() and int(known.max()) >= steps:
            raise StateCorrupt(f"state: tensor {spec.name} knows a step after the last one")


def split_tensors(tensors: Tensors, *groups: str) -> list[TensorDict]:
    """Return the tensors of a state that belong to each of some groups, and the others; all are
    named `GROUP.NAME`.
    """
    found: dict[str, TensorDict] = {group: {} for group in (*groups, "")}
    for name, one in tensors.items():
        found.get(name.partition(".")[0], found[""])[name] = one
    return list(found.values())


def trim_unused_slots(tensors: Tensors, specs: Iterable[TensorSpec]) -> TensorDict:
    """Return the tensors of a state without unused slots, contiguous; tensors that lose nothing are
    not copied.
    """
    declared = [spec for spec in specs if spec.name in tensors]
    packed = dict(tensors)
    for slot in SLOTS:
        having = [
            spec
            for spec in declared
            if slot in spec.dims and spec.shape[spec.dims.index(slot)] is not None
        ]
        # The smallest first: its last entry usually shows at once that all slots are in use.
        having.sort(key=lambda spec: tensors[spec.name].numel())
        used = 0
        for spec in having:
            used = _used(packed[spec.name], spec, spec.dims.index(slot), used)
        for spec in having:
            packed[spec.name] = (
                packed[spec.name].narrow(spec.dims.index(slot), 0, used).contiguous()
            )
    return packed


def restore_unused_slots(tensors: Tensors, specs: Iterable[TensorSpec]) -> TensorDict:
    """Undo `trim_unused_slots`. The tensors must fit the specs (`check_tensor_shapes`); whole ones
    are not copied.
    """
    whole = dict(tensors)
    for spec in specs:
        if (found := tensors.get(spec.name)) is None:
            continue
        wanted = [
            size if want is None else want
            for want, size in zip(spec.shape, found.shape, strict=True)
        ]
        if wanted != list(found.shape):
            full = whole[spec.name] = torch.full(
                wanted, spec.fill, dtype=spec.dtype, device=found.device
            )
            full[tuple(slice(0, size) for size in found.shape)] = found
    return whole


def _used(tensor: Tensor, spec: TensorSpec, axis: int, at_least: int) -> int:
    """Return how many entries of an axis to keep, at least `at_least`, so that the rest hold only
    `fill`.
    """
    size = tensor.shape[axis]
    bits = _BITS[tensor.element_size()]
    fill = torch.full((1,), spec.fill, dtype=spec.dtype, device=tensor.device).view(bits)
    entries = tensor.view(bits).movedim(axis, 0).unsqueeze(-1).flatten(1)
    if at_least == size or bool((entries[size - 1] != fill).any()):
        return size
    differing = (entries[at_least:] != fill).any(1).nonzero()
    return at_least + (int(differing[-1]) + 1 if len(differing) else 0)
