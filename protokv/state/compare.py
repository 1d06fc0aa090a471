"""How two states differ, header and tensors, bit for bit: 0.0 and -0.0 differ, and so do two NaNs with other bits."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from protokv.state.header import Header, State


def compare(a: State, b: State) -> dict[str, Any]:
    """Return how two states differ, as a JSON document.

    It has `equal`, `tensors_compared` (in either state), `header` and `tensors`. An entry of `header` has the `field`,
    such as `a.b[0].c`, and its values `a` and `b`; None where a state lacks it. An entry of `tensors` has the `name`,
    dtype and shape in `a` and `b`, such as `float32 [2, 3]`, the number of `elements`, the number `differing` in any
    bit, and the `max_abs_difference`. The last three are None if dtype or shape differ; `max_abs_difference` is None as
    well if it is not finite.
    """
    ours, theirs = (dict(flatten(Header.to_json(state))) for state in (a, b))
    header = [
        {"field": name, "a": ours.get(name), "b": theirs.get(name)}
        for name in {**ours, **theirs}
        if name not in ours or name not in theirs or _typed(ours[name]) != _typed(theirs[name])
    ]
    names = sorted({*a.tensors, *b.tensors})
    found = [_compare_tensors(name, a.tensors.get(name), b.tensors.get(name)) for name in names]
    tensors = [one for one in found if one is not None]
    return {"equal": not header and not tensors, "tensors_compared": len(names), "header": header, "tensors": tensors}


def _compare_tensors(name: str, a: Tensor | None, b: Tensor | None) -> dict[str, Any] | None:
    entry = {"name": name, "a": _describe(a), "b": _describe(b)}
    if a is None or b is None or a.dtype != b.dtype or a.shape != b.shape:
        return {**entry, "elements": None, "differing": None, "max_abs_difference": None}
    flat = [tensor.reshape(-1) for tensor in (a, b)]
    ours, theirs = (one.view(torch.uint8).view(-1, one.element_size()) for one in flat)
    unequal = (ours != theirs).any(-1)
    if not unequal.any():
        return None
    x, y = (one[unequal].double() for one in flat)
    distance = float((x - y).abs().max())
    return {
        **entry,
        "elements": a.numel(),
        "differing": len(x),
        "max_abs_difference": distance if math.isfinite(distance) else None,
    }


def _describe(tensor: Tensor | None) -> str | None:
    return None if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def flatten(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """Return the path, such as `a.b[0].c`, and the value of every field of a JSON document."""
    if isinstance(value, dict) and value:
        return [one for k, v in value.items() for one in flatten(v, f"{path}.{k}" if path else str(k))]
    if isinstance(value, (list, tuple)) and value:
        return [one for i, v in enumerate(value) for one in flatten(v, f"{path}[{i}]")]
    return [(path, value)]


def _typed(value: Any) -> Any:
    """Tell True from 1, but not 1 from 1.0, which JSON may mix up."""
    return (isinstance(value, bool), list(value) if isinstance(value, tuple) else value)
