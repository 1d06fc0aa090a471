"""Attention over a context and a tail at the cost of attention without a bias.

Each set of tokens is attended to by itself, with its log-sum-exp, and the results are merged: the tail is causal and
the slots are not, slots may want their queries turned, and no kernel takes both in one call without a mask of all
queries by all tokens. The query heads of a KV head stand one below the other, so keys and values are never repeated;
the bias of a slot is broadcast over queries; keys and values are read in their dtype, where they are.

The same as `plain`, up to the order of sums.

`LocalKV`: the keys and values of the tokens being forwarded now, which no memory has seen yet.

Owns its buffers, and the mask that makes it causal. Knows no model and no memory.

One softmax attention that also returns its log-sum-exp, by the kernel that fits device and dtype.

What torch's public `scaled_dot_product_attention` does not return, its kernels do: with the log-sum-exp, attention over
several sets of tokens is merged afterwards. Masks are float32 and are added to float32 logits in every kernel but that
of CUDA for masks of one query each, whose 0 and `-inf` are exact in any dtype. Knows nothing of contexts and models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from protokv.core.context import Segment
from protokv.core.rotary import rotate
from protokv.extras.sharding import runs_of


def attend(
    query: Tensor,
    segments: Sequence[Segment],
    tail: tuple[Tensor, Tensor],
    scaling: float,
    causal: Tensor | None = None,
) -> Tensor:
    """Softmax attention of `T` queries over the slots of all segments and, causally, over the `n` tokens of the tail.

    Args:
        query: `[Hq, T, D]`, rotated; query `i` is the token `n - T + i` of the tail.
        segments: what the layer reads of a context, `N` slots each; keys and values in the dtype of the query.
        tail: keys `[H, n, D]`, values `[H, n, D]`, `n >= T`.
        scaling: the factor on the logits, usually `D ** -0.5`.
        causal: `causal_mask` of these numbers if it is at hand.

    Returns:
        `[Hq, T, D]` in the dtype of the query.
    """
    heads, T, D = query.shape
    keys, values = tail
    H, n = keys.shape[:2]
    folded = query.reshape(H, -1, D)
    if causal is None:
        causal = causal_mask(T, n, heads // H, query.device)
    parts = [attention(folded, keys, values, causal, scaling)]
    for segment in segments:
        if not segment.keys.shape[1]:
            continue
        asked = folded
        if segment.turn is not None:
            asked = rotate(folded, *segment.turn).to(query.dtype)
        parts.append(attention(asked, segment.keys, segment.values, segment.bias.unsqueeze(1), scaling))
    if T == 1 and len(parts) == 2 and query.device.type == "cpu":
        return merged_pair(*parts).view(heads, T, D)
    return merged(parts).view(heads, T, D)


def merged(parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """One attention from attentions over disjoint sets of tokens.

    Args:
        parts: outputs `[H, M, D]` and their log-sum-exp `[H, M]` float32, as `kernels.attention` returns them.

    Returns:
        `[H, M, D]` in the dtype of the outputs, summed in float32.
    """
    first = parts[0][0]
    if len(parts) == 1:
        return first
    shares = torch.stack([lse for _, lse in parts], -1).softmax(-1)
    total = first * shares[..., :1]
    for index, (out, _) in enumerate(parts[1:], start=1):
        # The last sum is rounded to the dtype as it is written.
        into = torch.empty_like(first) if index == len(parts) - 1 else None
        total = torch.addcmul(total, out, shares[..., index : index + 1], out=into)
    return total


def merged_pair(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Tensor:
    """`merged` of two for one query on a CPU, whose time goes into calls, and most of it into the first ones of a kind:
    their code has left the cache while the context was read. More calls in half precision, but of fewer kinds."""
    share = (other[1] - one[1]).sigmoid_().unsqueeze(-1)
    return torch.lerp(one[0].float(), other[0].float(), share).to(one[0].dtype)


class LocalKV:
    """Keys and values `[L, H, n, D]` of the tokens forwarded since the context was taken, each seen causally.

    While watching, the tail is one step and becomes what the memory appends. While asking, it is the question and
    the answer so far, and is dropped afterwards: this is why asking changes nothing. Each layer appends in turn, and
    `length` moves when the last layer has. What fills the tail at once is kept as the model made it; otherwise there
    are buffers for `capacity` tokens, allocated once. Where the layers of a model stand on several devices, each has
    its keys and values on its own.
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
            device: where all is read together, and of all layers unless they have their own.
            layer_devices: device of each layer.
        """
        self._runs = runs_of(layer_devices or [device] * layers)
        self._device, self._layers, self._capacity, self._dtype = device, layers, capacity, dtype
        self._size = (kv_heads, capacity, head_size)
        # Of each layer: keys and values.
        self._held: list[tuple[Tensor, Tensor]] = []
        self._masks: dict[tuple[int, int, int, torch.device], Tensor] = {}
        self.length = 0

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add `[H, T, D]` of one layer; return all of that layer, `[H, n + T, D]`, on its device."""
        start, stop = self.length, self.length + keys.shape[1]
        if stop > self._capacity:
            raise ValueError(f"a tail of {self._capacity} tokens cannot take {stop}")
        if layer == self._layers - 1:
            self.length = stop
        if not start and stop == self._capacity:
            self._held.append((keys, values))
            return keys, values
        if not self._held:
            self._allocate()
        held_keys, held_values = self._held[layer]
        held_keys[:, start:stop] = keys
        held_values[:, start:stop] = values
        return held_keys[:, :stop], held_values[:, :stop]

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values `[H, n, D]` of one layer, on its device; between forwards."""
        keys, values = self._held[layer]
        return keys[:, : self.length], values[:, : self.length]

    def read_all(self) -> tuple[Tensor, Tensor]:
        """Keys, rotated as the model made them, and values of all layers, `[L, H, n, D]` each, in one place."""
        H, _, D = self._size
        if not self.length:
            keys, values = torch.empty(2, self._layers, H, 0, D, dtype=self._dtype, device=self._device)
        else:
            parts = [held[:, : self.length].to(self._device) for pair in zip(*self._held, strict=True) for held in pair]
            keys, values = torch.stack(parts).view(2, self._layers, H, self.length, D)
        return keys, values

    def mask(self, queries: int, tokens: int, groups: int, device: torch.device) -> Tensor | None:
        """`causal_mask` of a forward, made once for all of its layers on a device."""
        wanted = (queries, tokens, groups, device)
        if queries > 1 and wanted not in self._masks:
            mask = causal_mask(*wanted)
            assert mask is not None
            # Another forward has another length: what was made for the last one is of no use.
            self._masks = {key: held for key, held in self._masks.items() if key[:3] == wanted[:3]} | {wanted: mask}
        return self._masks.get(wanted)

    def _allocate(self) -> None:
        for run in self._runs:
            keys, values = torch.empty(2, len(run), *self._size, dtype=self._dtype, device=run.device)
            self._held.extend(zip(keys, values, strict=True))


def causal_mask(queries: int, tokens: int, groups: int, device: torch.device) -> Tensor | None:
    """What the `T` last of `n` tokens see of these, for the query heads of a KV head one below the other.

    Returns:
        `[1, groups * T, n]` float32, 0 or `-inf`; None where one token sees everything.
    """
    if queries == 1:
        return None
    mask = torch.full((groups, queries, tokens), -torch.inf, device=device).triu_(tokens - queries + 1)
    return mask.view(1, groups * queries, tokens)


HALVES = (torch.float16, torch.bfloat16)


def attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor]:
    """Attention of `M` queries over `N` keys in each of `H` heads.

    Args:
        query: `[H, M, D]`.
        keys: `[H, N, D]`, the dtype of the query, `N > 0`.
        values: `[H, N, D]`, likewise.
        mask: float32, added to the logits: `[H, 1, N]`, the same for all queries, or `[1, M, N]`, the same in all
            heads. No row may be `-inf` throughout: it has no log-sum-exp, and the kernels differ in what they return.
        scaling: the factor on the logits.

    Returns:
        `[H, M, D]` in the dtype of the query, and the natural log of the sum of exponentials, `[H, M]` float32.
    """
    device, size = query.device.type, query.shape[-1]
    if device == "cpu":
        return _cpu(query, keys, values, mask, scaling)
    # The kernels read 16 bytes at a time.
    if device == "cuda" and size % 8 == 0 and size >= 16:
        if query.dtype in HALVES and mask is not None and mask.shape[1] == 1 < query.shape[1]:
            return _flex(query, keys, values, mask, scaling)
        if query.dtype not in HALVES or mask is None or mask.shape[1] > 1:
            return _efficient(query, keys, values, mask, scaling)
    return _by_products(query, keys, values, mask, scaling)


def _cpu(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float) -> tuple[Tensor, Tensor]:
    """torch's fused kernel of the CPU: the mask is read in place, broadcast by a stride of 0."""
    # For one query much of the time goes into calls: views are made in the cheapest way.
    shown = None if mask is None else mask.expand(query.shape[0], query.shape[1], -1).unsqueeze(0)
    out, lse = torch._scaled_dot_product_flash_attention_for_cpu(
        query.unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0), attn_mask=shown, scale=scaling
    )
    return out.squeeze(0), lse.squeeze(0)


def _efficient(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor]:
    """The memory-efficient kernel of CUDA, which wants masks in the dtype of the query and rows that are aligned."""
    H, M, N = query.shape[0], query.shape[1], keys.shape[1]
    shown = None
    if mask is not None:
        aligned = functional.pad(mask.to(query.dtype), (0, -N % 16))
        shown = aligned[..., :N].expand(H, M, N)[None]
    out, lse, _, _ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query[None], keys[None], values[None], shown, True, scale=scaling
    )
    return out[0], lse[0, :, :M]


def _flex(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """FlexAttention, compiled: the bias is added to float32 logits inside the kernel, whatever the dtype."""
    bias = mask[:, 0]

    def with_bias(score: Tensor, _: Tensor, head: Tensor, __: Tensor, slot: Tensor) -> Tensor:
        return score + bias[head, slot]

    out, lse = _compiled_flex()(query[None], keys[None], values[None], with_bias, scaling)
    return out[0], lse[0]


@cache
def _compiled_flex() -> Callable[..., tuple[Tensor, Tensor]]:
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    def call(query: Tensor, keys: Tensor, values: Tensor, score: Any, scaling: float) -> tuple[Tensor, Tensor]:
        out, aux = flex_attention(query, keys, values, score, scale=scaling, return_aux=AuxRequest(lse=True))
        assert aux.lse is not None
        return out, aux.lse

    compiled: Callable[..., tuple[Tensor, Tensor]] = torch.compile(call)
    return compiled


def _by_products(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor]:
    """Two products and a float32 softmax between them, for devices without a kernel that returns the log-sum-exp."""
    logits = torch.matmul(query.float() * scaling, keys.float().transpose(1, 2))
    if mask is not None:
        logits = logits + mask
    lse = logits.logsumexp(-1)
    return torch.matmul((logits - lse[..., None]).exp(), values.float()).to(query.dtype), lse
