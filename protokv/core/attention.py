"""Attention over a context and over the tokens being forwarded now, at the cost of attention without a bias.

The tokens being forwarded (`LocalKV`) are causal and the slots of a context are not, so each set is attended to by
itself, and the results are merged by their log-sum-exp. Query heads of one KV head are stacked as queries, so keys and
values are never repeated; the bias of a slot is broadcast over queries. Knows no model and no memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from protokv.core import kernels
from protokv.core.context import Context, Segment
from protokv.core.hybrid import HybridState
from protokv.core.rotary import rotate

NAME: Final = "protokv"
"""The name of our attention in transformers, where `protokv.core.stream_cache` registers it."""


def attend(
    query: Tensor,
    segments: Sequence[Segment],
    local: tuple[Tensor, Tensor],
    scaling: float,
    causal: Tensor | None = None,
) -> Tensor:
    """Return attention of `T` tokens over the slots of a context and over the local tokens.

    Args:
        query: `[Hq, T, D]`, rotated; query `i` is local token `n - T + i`.
        segments: what the layer reads of a context, `N` slots each, in the dtype of the query.
        local: keys and values `[H, n, D]`, `n >= T`.
        scaling: the factor on the logits, usually `D ** -0.5`.
        causal: `causal_mask` of these sizes, if it is at hand.

    Returns:
        `[Hq, T, D]` in the dtype of the query.
    """
    heads, T, D = query.shape
    keys, values = local
    H, n = keys.shape[:2]
    stacked = query.reshape(H, -1, D)
    if causal is None:
        causal = causal_mask(T, n, heads // H, query.device)
    parts = [kernels.attention(stacked, keys, values, causal, scaling)]
    for segment in segments:
        if not segment.keys.shape[1]:
            continue
        turn = segment.query_rotation
        rotated = stacked if turn is None else rotate(stacked, *turn).to(query.dtype)
        parts.append(kernels.biased_attention(rotated, segment.keys, segment.values, segment.bias, scaling))
    if T == 1 and len(parts) == 2 and query.device.type == "cpu":
        return kernels.merge_pair(*parts).reshape(heads, T, D)
    return kernels.merge(parts).reshape(heads, T, D)


def causal_mask(queries: int, tokens: int, groups: int, device: torch.device) -> Tensor | None:
    """Return the mask of the last `queries` of some tokens, repeated for the `groups` query heads of a KV head.

    Returns:
        `[1, groups * queries, tokens]` float32, 0 or `-inf`; None if one token sees everything.
    """
    if queries == 1:
        return None
    mask = torch.full((groups, queries, tokens), -torch.inf, device=device).triu_(tokens - queries + 1)
    return mask.view(1, groups * queries, tokens)


class Masks:
    """The masks of a forward, as `attend` takes them, each made once for all layers on a device."""

    def __init__(self) -> None:
        self._made: dict[tuple[object, ...], tuple[Tensor | None, Tensor | None]] = {}

    def __call__(
        self, mask: Tensor | None, queries: int, tokens: int, groups: int, device: torch.device
    ) -> Tensor | None:
        """Return a mask for `attend`.

        Args:
            mask: `[T, n]` bool, True where a token is seen, or float, added to the logits; None: `causal_mask`.
            queries: T.
            tokens: n.
            groups: query heads of a KV head.
            device: of the layer.
        """
        if queries == 1 and mask is None:
            return None
        wanted = (queries, tokens, groups, None if mask is None else mask.data_ptr(), device)
        if wanted not in self._made:
            if mask is None:
                made = causal_mask(queries, tokens, groups, device)
            else:
                seen = mask if mask.dtype == torch.bool else None
                floats = mask.float() if seen is None else torch.zeros(seen.shape, device=device)
                made = (floats if seen is None else floats.masked_fill_(~seen, -torch.inf)).repeat(groups, 1)[None]
            # Masks of earlier forwards are not needed again. The mask is held, so that no other has its address.
            self._made = {key: held for key, held in self._made.items() if key[:-1] == wanted[:-1]}
            self._made[wanted] = mask, made
        return self._made[wanted][1]


class LocalKV:
    """Keys and values `[L, H, n, D]` of the tokens forwarded since the context was taken.

    While watching these are one step, which the memory then appends. While asking they are the question and the answer
    so far, and are dropped afterwards: this is why asking changes nothing. Layers append in turn, and `length` moves
    when the last layer has. Keys and values of a layer stay on the device of that layer. Models of transformers have
    `protokv.core.stream_cache.StreamCache` in its place.
    """

    hybrid: HybridState | None = None

    def __init__(
        self, layers: int, kv_heads: int, capacity: int, head_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Make it empty.

        Args:
            layers: L.
            kv_heads: H.
            capacity: the most tokens it can take.
            head_size: D.
            dtype: of keys and values.
            device: where `read_all` returns them.
        """
        self._layers, self._capacity = layers, capacity
        self._empty = torch.empty(layers, kv_heads, 0, head_size, dtype=dtype, device=device)
        # Keys and values of each layer, with room for `capacity` tokens.
        self._held: list[tuple[Tensor, Tensor]] = []
        self._masks = Masks()
        self.length = 0

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, context: Context, scaling: float) -> Tensor:
        """Append keys and values of one layer, and attend to a context and to all local tokens.

        Args:
            layer: index of the layer.
            query: `[Hq, T, D]`, rotated.
            key: `[H, T, D]`, rotated.
            value: `[H, T, D]`.
            context: what the tokens attend to besides each other.
            scaling: the factor on the logits.

        Returns:
            `[Hq, T, D]`.
        """
        keys, values = self.append(layer, key, value)
        causal = self._masks(None, query.shape[1], keys.shape[1], query.shape[0] // keys.shape[0], query.device)
        return attend(query, context.at(layer, query), (keys, values), scaling, causal)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add `[H, T, D]` of one layer; return all of that layer, `[H, n + T, D]`."""
        start, stop = self.length, self.length + keys.shape[1]
        if stop > self._capacity:
            raise ValueError(f"room for {self._capacity} local tokens cannot take {stop}")
        if layer == self._layers - 1:
            self.length = stop
        if not start and stop == self._capacity:
            # Tokens that fill it at once, such as a step, are kept as the model made them.
            self._held.append((keys, values))
            return keys, values
        if layer == len(self._held):
            size = (keys.shape[0], self._capacity, keys.shape[2])
            self._held.append((keys.new_empty(size), values.new_empty(size)))
        held_keys, held_values = self._held[layer]
        held_keys[:, start:stop] = keys
        held_values[:, start:stop] = values
        return held_keys[:, :stop], held_values[:, :stop]

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values `[H, n, D]` of one layer; between forwards."""
        keys, values = self._held[layer]
        return keys[:, : self.length], values[:, : self.length]

    def read_all(self) -> tuple[Tensor, Tensor]:
        """Return keys, rotated as the model made them, and values of all layers, `[L, H, n, D]` each."""
        if not self.length:
            return self._empty, self._empty
        keys, values = zip(*(self.read(layer) for layer in range(self._layers)), strict=True)
        device = self._empty.device
        return torch.stack([one.to(device) for one in keys]), torch.stack([one.to(device) for one in values])
