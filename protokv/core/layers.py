"""The kinds of a model's layers, and the sizes of what those hold that a memory does not serve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

import torch

KINDS: Final = "layers.kinds"
"""The tensor of a state that names the kind of each layer; what layer 3 holds is `layers.3.NAME`."""

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


class LayerKind(IntEnum):
    """What the attention of a layer calls for."""

    FULL = 0
    SLIDING = 1
    LINEAR = 2


@dataclass(frozen=True, slots=True)
class HybridShape:
    """What layers hold whose attention a memory does not serve.

    Attributes:
        layers: M.
        tensors: shape and dtype of each tensor, by name; the tokens of a window (axis 1 of keys and values) may be any.
        kinds: of the M layers, and whether a layer shares the tokens of an earlier one; None: a state that is read
            without its model says so itself.
        window: W, tokens that sliding layers read; None: there are none, or only the model knows.
        devices: of each tensor; empty: all on the device of the memory.
    """

    layers: int
    tensors: Shapes
    kinds: Sequence[tuple[LayerKind, bool]] | None = None
    window: int | None = None
    devices: Mapping[str, torch.device] = field(default_factory=dict)

    @property
    def slides(self) -> bool:
        """Whether some layers are sliding."""
        return any(name.endswith(".keys") for name in self.tensors)

    @property
    def recurs(self) -> bool:
        """Whether some layers are linear."""
        return any("_states" in name for name in self.tensors)

    @classmethod
    def of(cls, found: Shapes) -> HybridShape | None:
        """Return what a state holds of these tensors; None if it is nothing. ValueError."""
        if KINDS not in found:
            return None
        (layers, _), _ = found[KINDS]
        return cls(layers, {name: one for name, one in found.items() if name.startswith("layers.") and name != KINDS})
