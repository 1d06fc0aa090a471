"""`HybridState`: what layers hold that the memory does not serve: windows of sliding layers, states of linear ones.

transformers' own layers make and read it (`protokv.core.stream_cache`); here it is kept, saved and loaded, by the
number of the layer. A forward replaces its tensors and writes to none of them, so a fork is free: a step forwards with
a fork, which the memory keeps; a question forwards with a fork that is dropped, so asking changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor

from protokv.core.layers import KINDS, LayerKind
from protokv.core.sanitize import LARGEST
from protokv.core.tensors import MemoryShape, StatePart, TensorSpec
from protokv.errors import StateCorrupt


class HybridState(StatePart):
    """What the layers of one stream hold.

    Attributes:
        kinds: of the layers of the model, and whether each shares; empty if only its state knows them.
        held: tensors by name, `[H, n, D]` of the last n tokens of a window, or as transformers shapes a state; none
            before the first forward.
    """

    def __init__(self, shape: MemoryShape) -> None:
        assert shape.hybrid is not None
        self._shape, self._device = shape.hybrid, shape.device
        self.kinds = tuple(shape.hybrid.kinds or ())
        self.held: dict[str, Tensor] = {}

    @staticmethod
    def declare(shape: MemoryShape) -> tuple[TensorSpec, ...]:
        """Declare the kinds of layers, and what each holds."""
        assert shape.hybrid is not None
        meaning = "of each layer of the model: its kind (0 full, 1 sliding, 2 linear), and whether it shares tokens"
        found = [TensorSpec(KINDS, ("model_layer", "field"), (shape.hybrid.layers, 2), torch.int32, meaning)]
        for name, (sizes, dtype) in shape.hybrid.tensors.items():
            layer, what = name.rsplit(".", 1)[0], name.split(".", 2)[2]
            if what in ("keys", "values"):
                dims = tuple(f"{layer} {axis}" for axis in ("head", "token", "feature"))
                grows = (sizes[0], None, *sizes[2:])
                found.append(TensorSpec(name, dims, grows, dtype, f"last {what} of a sliding layer, rotated"))
            else:
                dims = tuple(f"{name} {axis}" for axis in range(len(sizes)))
                found.append(
                    TensorSpec(name, dims, sizes, dtype, f"{what} of a linear layer, as transformers has them")
                )
        return tuple(found)

    def fork(self) -> HybridState:
        """Return what a forward may advance without touching this one."""
        return copy(self)

    def settle(self, before: HybridState) -> None:
        """Let no number stay that is not finite, after a forward that began with `before`."""
        self.held = settle_tensors(self.held, before.held)

    def live_tensors(self) -> dict[str, Tensor]:
        """Return all of it, on one device."""
        kinds = torch.tensor([tuple(map(int, row)) for row in self.kinds], dtype=torch.int32)
        return {KINDS: kinds} | {name: held.to(self._device) for name, held in self.held.items()}

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Check that the kinds are those of this model, and that no window is longer than its own."""
        kinds = tensors[KINDS].tolist()
        if self.kinds and kinds != [list(map(int, row)) for row in self.kinds]:
            raise StateCorrupt(f"state: tensor {KINDS} is not that of this model")
        if any(kind not in iter(LayerKind) or shares not in (0, 1) for kind, shares in kinds):
            raise StateCorrupt(f"state: tensor {KINDS} names a kind of layer that there is not")
        for name, held in tensors.items():
            if name.endswith((".keys", ".values")) and held.shape[1] >= (self._shape.window or held.shape[1] + 1):
                raise StateCorrupt(f"state: tensor {name} has more tokens than a window of this model")

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Take a checked state."""
        self.kinds = tuple((LayerKind(kind), bool(shares)) for kind, shares in tensors[KINDS].tolist())
        on = self._shape.devices
        self.held = {
            name: held.to(on.get(name, self._device), copy=True) for name, held in tensors.items() if name != KINDS
        }

    def report(self) -> dict[str, Any]:
        """Return the kind of every layer of the model, and the tokens that a window reads."""
        rows = [{"kind": kind.name.lower(), "shared": shares} for kind, shares in self.kinds]
        return {"layer_kinds": rows, "sliding_window": self._shape.window}


def settle_tensors(held: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what layers hold without numbers that are not finite; nothing waits for the device.

    A token of a window becomes 0. A state cannot drop single tokens, so it is again as it was before the forward.
    """
    settled = {}
    for name, one in held.items():
        small = one.abs() <= LARGEST
        if name.endswith((".keys", ".values")):
            settled[name] = one.masked_fill(~small.all(2, keepdim=True), 0)
        else:
            settled[name] = torch.where(small.all(), one, before.get(name, torch.zeros_like(one)))
    return settled
