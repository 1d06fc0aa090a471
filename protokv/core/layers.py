"""What layers of a model hold that a memory does not serve: windows of sliding layers, states of
linear ones.

In a state the tensor `layers.kinds` names the kind of each layer, and what layer 3 holds is
`layers.3.NAME`.
"""

from __future__ import annotations

from enum import IntEnum

import torch

from protokv.core.sanitize import LARGEST_NUMBER
from protokv.core.tensors import Specs, TensorDict, Tensors, TensorSpec
from protokv.errors import StateCorrupt
from protokv.texts import JsonObject

LAYER_KINDS = "layers.kinds"


class LayerKind(IntEnum):
    """What the attention of a layer calls for."""

    FULL = 0
    SLIDING = 1
    LINEAR = 2


def declare_layer_tensors(held: Tensors) -> Specs:
    """Declare what layers hold: the kinds, and by the name of a layer `[H, n, D]` of a window, or a
    state.
    """
    found = []
    for name, one in held.items():
        sizes = tuple(one.shape)
        what = name.split(".")[-1 if is_window_tensor(name) else -2]
        if name == LAYER_KINDS:
            meaning = (
                "of each layer of the model: its kind (0 full, 1 sliding, 2 linear), and whether "
                "it shares tokens"
            )
            found.append(TensorSpec(name, ("model_layer", "field"), sizes, torch.int32, meaning))
        elif is_window_tensor(name):
            dims = tuple(
                f"{name.rpartition('.')[0]} {axis}" for axis in ("head", "token", "feature")
            )
            meaning = f"last {what} of a sliding layer, rotated"
            found.append(TensorSpec(name, dims, (sizes[0], None, *sizes[2:]), one.dtype, meaning))
        else:
            dims = tuple(f"{name} {axis}" for axis in range(len(sizes)))
            found.append(
                TensorSpec(
                    name,
                    dims,
                    sizes,
                    one.dtype,
                    f"{what} of a linear layer, as transformers has it",
                )
            )
    return tuple(found)


def is_window_tensor(name: str) -> bool:
    """Return whether a tensor has the last tokens of a sliding layer."""
    return name.endswith((".keys", ".values"))


def read_layer_kinds(held: Tensors) -> JsonObject:
    """Return the kind of every layer of the model that left this; nothing if all have full
    attention. StateCorrupt.
    """
    if not held:
        return {}
    kinds = held.get(LAYER_KINDS)
    if kinds is None or kinds.ndim != 2 or kinds.shape[1] != 2 or kinds.dtype != torch.int32:
        raise StateCorrupt(f"state: tensor {LAYER_KINDS} is missing, or no pair for each layer")
    rows: list[list[int]] = kinds.tolist()
    if any(kind not in set(LayerKind) or shares not in (0, 1) for kind, shares in rows):
        raise StateCorrupt(f"state: tensor {LAYER_KINDS} names a kind of layer that there is not")
    return {
        "layer_kinds": [
            {"kind": LayerKind(kind).name.lower(), "shared": bool(shares)} for kind, shares in rows
        ]
    }


def clean_layer_tensors(held: Tensors, before: Tensors) -> TensorDict:
    """Return what layers hold without numbers that are not finite; nothing waits for the device."""
    settled = {}
    for name, one in held.items():
        small = one.abs() <= LARGEST_NUMBER
        if is_window_tensor(name):
            settled[name] = one.masked_fill(~small.all(2, keepdim=True), 0)
        else:
            # It cannot drop single tokens, so it is again as it was before the forward.
            settled[name] = torch.where(small.all(), one, before.get(name, 0))
    return settled
