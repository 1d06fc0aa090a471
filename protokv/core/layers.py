"""The kinds of a model's layers: full attention, which a memory serves, and sliding and linear attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import torch


class LayerKind(IntEnum):
    """What the attention of a layer calls for."""

    FULL = 0
    SLIDING = 1
    LINEAR = 2


class LayerSlot(NamedTuple):
    """Where a layer reads: it is, or shares the tokens of, the `number`-th layer of its kind that holds something."""

    kind: LayerKind
    number: int
    shared: bool = False


@dataclass(frozen=True, slots=True)
class HybridShape:
    """Sizes of what layers hold whose attention a memory does not serve.

    Attributes:
        layers: M.
        sliding: Ls, KV heads, W - 1, head size; None if no layer is of this kind, as in the other two.
        recurrent: Ll, value heads, key size, value size.
        convolution: Ll, channels, inputs kept.
        places: of the M layers; None: a state that is read without its model says so itself.
        devices: of the M layers, if a model is spread over several.
    """

    layers: int
    sliding: tuple[int, int, int, int] | None = None
    recurrent: tuple[int, int, int, int] | None = None
    convolution: tuple[int, int, int] | None = None
    places: tuple[LayerSlot, ...] | None = None
    devices: Sequence[torch.device] | None = None

    @classmethod
    def of(cls, found: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> HybridShape | None:
        """Return the sizes of a state from the shapes of its tensors; None if it carries nothing. ValueError."""
        if "layers.places" not in found:
            return None

        def sizes(name: str, axes: int) -> Any:
            shape = found[name][0] if name in found else None
            if shape is not None and len(shape) != axes:
                raise ValueError(f"{name} has {len(shape)} axes")
            return shape

        (layers, _) = found["layers.places"][0]
        return cls(layers, sizes("sliding.keys", 4), sizes("linear.recurrent", 4), sizes("linear.convolution", 3))


def assign_layers(kinds: Sequence[LayerKind], shared: Sequence[bool] | None = None) -> tuple[LayerSlot, ...]:
    """Return the places of layers in order; a shared layer reads the last one of its kind that holds something."""
    held, places = [0, 0, 0], []
    for kind, reuses in zip(kinds, shared or [False] * len(kinds), strict=True):
        held[kind] += not reuses
        places.append(LayerSlot(kind, held[kind] - 1, reuses))
    return tuple(places)
