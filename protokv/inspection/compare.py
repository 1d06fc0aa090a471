"""How two states differ: fields of their headers, and tensors, element by element and bit for bit.

Equal means the same bytes: 0.0 and -0.0 differ, and so do two NaNs of different bits. Knows nothing of what the fields
and tensors mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from protokv.core.snapshot import Header, State

# Elements compared at a time, so that a large tensor is not copied whole to float64.
_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """A field of the header, `a.b[0].c`; None where a state has no such field."""

    field: str
    a: Any
    b: Any


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that is not the same in both states.

    Attributes:
        name: of the tensor.
        a, b: its dtype and shape in each state, `float32 [2, 3]`; None where a state has no such tensor.
        elements: how many it has; None unless dtype and shape are the same.
        differing: how many of these differ in any bit; None as above.
        max_abs_difference: the largest distance between two elements; None as above, and where one is NaN or both are
            infinite.
    """

    name: str
    a: str | None
    b: str | None
    elements: int | None = None
    differing: int | None = None
    max_abs_difference: float | None = None


@dataclass(frozen=True, slots=True)
class Difference:
    """All that differs; empty for equal states. `tensors_compared` counts those of either."""

    fields: list[FieldDifference]
    tensors: list[TensorDifference]
    tensors_compared: int

    @property
    def equal(self) -> bool:
        """Nothing differs."""
        return not self.fields and not self.tensors


def compare(a: State, b: State) -> Difference:
    """Return what differs between two loaded states."""
    ours, theirs = (dict(_flat(Header.to_json(state))) for state in (a, b))
    fields = [
        FieldDifference(name, ours.get(name), theirs.get(name))
        for name in [*ours, *(name for name in theirs if name not in ours)]
        if name not in ours or name not in theirs or _kinded(ours[name]) != _kinded(theirs[name])
    ]
    names = sorted({*a.tensors, *b.tensors})
    found = (_tensor(name, a.tensors.get(name), b.tensors.get(name)) for name in names)
    return Difference(fields, [one for one in found if one is not None], len(names))


def _tensor(name: str, a: Tensor | None, b: Tensor | None) -> TensorDifference | None:
    if a is None or b is None or a.dtype != b.dtype or a.shape != b.shape:
        return TensorDifference(name, _described(a), _described(b))
    differing, distance = 0, 0.0
    for begin in range(0, a.numel(), _AT_ONCE):
        x, y = (t.reshape(-1)[begin : begin + _AT_ONCE] for t in (a, b))
        bits = [t.contiguous().view(torch.uint8).view(-1, t.element_size()) for t in (x, y)]
        unequal = (bits[0] != bits[1]).any(-1)
        differing += int(unequal.sum())
        if unequal.any():
            # max() keeps NaN, which is what an element without a distance must lead to.
            apart = (x[unequal].double() - y[unequal].double()).abs()
            distance = float(torch.cat((apart, torch.tensor([distance], dtype=torch.float64))).max())
    if not differing:
        return None
    known = distance if distance == distance and distance != float("inf") else None
    return TensorDifference(name, _described(a), _described(b), a.numel(), differing, known)


def _described(tensor: Tensor | None) -> str | None:
    return None if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _flat(value: Any, path: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        return [one for k, v in value.items() for one in _flat(v, f"{path}.{k}" if path else str(k))]
    if isinstance(value, (list, tuple)) and value:
        return [one for i, v in enumerate(value) for one in _flat(v, f"{path}[{i}]")]
    return [(path, value)]


def _kinded(value: Any) -> Any:
    """True is not 1; that 1 is 1.0 is an accident of JSON."""
    return (isinstance(value, bool), list(value) if isinstance(value, tuple) else value)
