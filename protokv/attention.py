"""Attention over a bounded context with a logit bias a slot, and over the exact tokens that come after it.

Owns `Tail` (the keys and values of the tokens being forwarded now, which no memory has seen yet) and the attention of a
query over a `Context` and a tail. It is handed to transformers by `register` under the name `protokv`; nothing here
knows a model, a memory or a file.

Softmax does not care about the order of its slots, so a ring is never unrolled and a free slot is never compacted
away: its bias is -inf. Logits and the softmax are float32 whatever the model's dtype (equation 3 of the paper adds
log n_k, which bfloat16 would round by up to 2 % of itself).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from protokv.context import Context
from protokv.layers import runs_of

NAME = "protokv"


class Tail:
    """Keys and values `[L, H, n, D]` of the tokens forwarded since the context was taken, each seen causally.

    While watching, the tail is one step and becomes what the memory appends. While asking, it is the question and
    the answer so far, and is dropped afterwards: this is why asking changes nothing. The buffers are allocated once
    for `capacity` tokens; each layer appends to them in turn, and `length` moves when the last layer has. Where the
    layers of a model stand on several devices, each has its keys and values on its own.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        capacity: int,
        head_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        layer_devices: Sequence[torch.device] | None = None,
    ) -> None:
        """An empty tail.

        Args:
            layers: L.
            kv_heads: H.
            capacity: tokens that it has room for.
            head_size: D.
            dtype: of keys and values.
            device: of `keys` and `values`, and of all layers unless they have their own.
            layer_devices: device of each layer.
        """
        runs = runs_of(layer_devices or [device] * layers)
        self._device, self._layers, self._capacity = device, layers, capacity
        sizes = [((len(run), kv_heads, capacity, head_size), run.device) for run in runs]
        self._keys = [torch.zeros(size, dtype=dtype, device=where) for size, where in sizes]
        self._values = [torch.zeros_like(part) for part in self._keys]
        # Of each layer: its run, and its place in it.
        self._place = [(index, place) for index, run in enumerate(runs) for place in range(len(run))]
        self.length = 0

    @property
    def keys(self) -> Tensor:
        """`[L, H, n, D]`, rotated as the model made them; joined on one device."""
        return self._joined(self._keys)

    @property
    def values(self) -> Tensor:
        """`[L, H, n, D]`; joined on one device."""
        return self._joined(self._values)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add `[H, T, D]` of one layer; return all of that layer, `[H, n + T, D]`, on its device."""
        start, stop = self.length, self.length + keys.shape[1]
        if stop > self._capacity:
            raise ValueError(f"a tail of {self._capacity} tokens cannot take {stop}")
        run, place = self._place[layer]
        held_keys, held_values = self._keys[run][place], self._values[run][place]
        held_keys[:, start:stop] = keys
        held_values[:, start:stop] = values
        if layer == self._layers - 1:
            self.length = stop
        return held_keys[:, :stop], held_values[:, :stop]

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        here = [part[:, :, : self.length] for part in parts]
        return here[0] if len(here) == 1 else torch.cat([part.to(self._device) for part in here])


def attend(
    query: Tensor,
    context: tuple[Tensor, Tensor, Tensor],
    tail: tuple[Tensor, Tensor],
    scaling: float,
) -> Tensor:
    """Softmax attention of `T` queries over `N` biased slots and, causally, over the `n` tokens that end with them.

    The query heads of one KV head are folded into its query axis (grouped-query attention), so keys and values are
    never repeated. Each of the two parts is one batched product; only the softmax sees them together.

    Args:
        query: `[Hq, T, D]`, rotated; query `i` is the token `n - T + i` of the tail.
        context: keys `[H, N, D]`, values `[H, N, D]`, bias `[H, N]` float32.
        tail: keys `[H, n, D]`, values `[H, n, D]`, `n >= T`.
        scaling: the factor on the logits, usually `D ** -0.5`.

    Returns:
        `[Hq, T, D]` in the dtype of the query.
    """
    query_heads, T, D = query.shape
    keys, values, bias = context
    tail_keys, tail_values = tail
    H, N, n = keys.shape[0], keys.shape[1], tail_keys.shape[1]
    folded = (query.float() * scaling).reshape(H, -1, D)
    groups = query_heads // H
    future = torch.arange(n, device=query.device) > torch.arange(n - T, n, device=query.device)[:, None]

    logits = folded.new_empty((H, groups * T, N + n))
    torch.baddbmm(bias[:, None, :], folded, keys.float().transpose(1, 2), out=logits[..., :N])
    torch.bmm(folded, tail_keys.float().transpose(1, 2), out=logits[..., N:])
    logits[..., N:].view(H, groups, T, n).masked_fill_(future, -torch.inf)
    weights = logits.softmax(-1)
    out = torch.bmm(weights[..., :N], values.float())
    out.baddbmm_(weights[..., N:], tail_values.float())
    return out.reshape(query_heads, T, D).to(query.dtype)


def _transformers_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    protokv_context: Context,
    protokv_tail: Tail,
    **_: Any,
) -> tuple[Tensor, None]:
    """The form transformers calls: query `[1, Hq, T, D]`, key and value `[1, H, T, D]`, returns `[1, T, Hq, D]`."""
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    tail = protokv_tail.append(layer, key[0], value[0])
    return attend(query[0], protokv_context.at(layer, query[0]), tail, scaling).transpose(0, 1).unsqueeze(0), None


def register() -> None:
    """Make `attn_implementation="protokv"` known to transformers. No mask function goes with it: none is built."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _transformers_attention)
