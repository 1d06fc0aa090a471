"""Linear layers that read one input, computed as one product: query, key and value of attention,
gate and up of an MLP.

A device starts fewer kernels, and reads weights in larger pieces. The layers stay what they were:
each has its own name, its weight and its bias. These are views of one memory, and nothing else
holds it, so a layer that is changed in place, moved or replaced is never read as it was before.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module, Parameter, functional

_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def join_projections(model: Module) -> None:
    """Let the layers that `_TOGETHER` names compute one product in every module of a model, in
    place.

    Left alone are layers of another class, those whose `forward` somebody has replaced, and those
    that differ in dtype, in device, in what they read, or in having a bias.
    """
    for module, names in product(model.modules(), _TOGETHER):
        # Where the value is the key itself, it has no layer.
        layers = [one for name in names if (one := getattr(module, name, None)) is not None]
        kinds = set(map(_find_kind, layers))
        if len(layers) > 1 and len(kinds) == 1 and None not in kinds:
            _Joined(layers)


def _find_kind(layer: Any) -> object:
    """Return what layers must have in common to be joined; None: this one cannot be."""
    if type(layer) is not Linear or "forward" in vars(layer):
        return None
    return layer.in_features, layer.weight.dtype, layer.weight.device, layer.bias is None


class _Joined:
    """Layers that read one input. The one that is called first computes for all of them."""

    def __init__(self, layers: list[Any]) -> None:
        self._layers = layers
        self._rows = [len(layer.weight) for layer in layers]
        self._names = ["weight"] if layers[0].bias is None else ["weight", "bias"]
        # The last input, and what was computed of it and is not read yet. Both change at once, as
        # several threads may call a model.
        self._ready: tuple[Any, dict[int, Tensor]] = (None, {})
        for name in self._names:
            held = [getattr(layer, name) for layer in layers]
            parts = torch.cat(held).split_with_sizes(self._rows)
            for layer, part in zip(layers, parts, strict=True):
                setattr(layer, name, Parameter(part, False))
        for index, layer in enumerate(layers):
            layer.forward = partial(self.forward, index)

    def forward(self, index: int, x: Tensor) -> Tensor:
        """Return what the layer of this index makes of an input."""
        known, parts = self._ready
        if x is not known or index not in parts:
            each = [[getattr(layer, name) for layer in self._layers] for name in self._names]
            joined = [_as_one(held) for held in each]
            if any(one is None for one in joined):
                return Linear.forward(self._layers[index], x)
            named: Any = dict(zip(self._names, joined, strict=True))
            together = functional.linear(x, **named)
            parts = dict(enumerate(together.split_with_sizes(self._rows, -1)))
        part = parts.pop(index)
        # An input is not kept longer than it is needed.
        self._ready = (x, parts) if parts else (None, {})
        return part


def _as_one(parts: list[Tensor]) -> Tensor | None:
    """Return tensors that lie one behind another in one memory as one tensor; None: they do not,
    or one of them is trained.
    """
    first = parts[0]
    memory = first.untyped_storage().data_ptr()
    end = first.storage_offset()
    for one in parts:
        place = (one.untyped_storage().data_ptr(), one.storage_offset())
        if place != (memory, end) or one.requires_grad:
            return None
        end += one.numel()
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())
