"""Make transformers call the attention of `LocalKV`: a function of the form it expects, and its name there.

`LinearStates` has the form of its caches, for layers of linear attention, which compute by themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from protokv.core.attention import LocalKV, attend
from protokv.core.context import Context
from protokv.core.hybrid import HybridState
from protokv.core.layers import LayerKind, LayerSlot

NAME = "protokv"


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    protokv_context: Context,
    protokv_local: LocalKV,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers calls it: query `[1, Hq, T, D]`, key and value `[1, H, T, D]`, returns `[1, T, Hq, D]`."""
    layer, local = int(module.layer_idx), protokv_local  # type: ignore[arg-type]
    place = LayerSlot(LayerKind.FULL, layer) if local.hybrid is None else local.hybrid.places[layer]
    if place.kind == LayerKind.SLIDING:
        assert local.hybrid is not None
        keys, values, mask = local.hybrid.window(place, key[0], value[0], local.blocks)
        mask = mask.repeat(query.shape[1] // keys.shape[0], 1)[None]
        out = attend(query[0], (), (keys, values), scaling, mask)
    elif place.shared:
        out = local.attend_again(place.number, query[0], scaling)
    else:
        out = local.attend(place.number, query[0], key[0], value[0], protokv_context, scaling)
    return out.transpose(0, 1).unsqueeze(0), None


def register() -> None:
    """Make `attn_implementation="protokv"` known to transformers. It has no mask function, so no mask is built."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention_forward)


class LinearStates:
    """The cache that transformers' layers of linear attention read and update: what `HybridState` holds for them.

    It says that it records the past, so that no kernel writes to a state in place.
    """

    def __init__(self, hybrid: HybridState) -> None:
        self._hybrid = hybrid

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer with attention as they are: `attention_forward` takes them."""
        return keys, values

    def is_recording_past(self, layer: int) -> bool:
        """Return True."""
        return True

    def get_conv_state(self, layer: int, state_idx: int = 0) -> Tensor:
        """Return the last inputs of the convolution, `[1, C, k]`."""
        return self._hybrid.convolution(self._index(layer))

    def get_recurrent_state(self, layer: int, state_idx: int = 0) -> Tensor:
        """Return `[1, Hv, Dk, Dv]`."""
        return self._hybrid.recurrent(self._index(layer))

    def update_conv_state(self, inputs: Tensor, layer: int, **_: Any) -> Tensor:
        """Take inputs `[1, C, T]`; return them behind the last ones."""
        return self._hybrid.convolve(self._index(layer), inputs)

    def update_recurrent_state(self, state: Tensor, layer: int, **_: Any) -> Tensor:
        """Take the state behind the last token."""
        self._hybrid.recur(self._index(layer), state)
        return state

    def _index(self, layer: int) -> int:
        return self._hybrid.places[layer].number
