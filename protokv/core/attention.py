"""Attention over a context and over the tokens being forwarded now, at the cost of attention
without a bias.

The tokens being forwarded (`TokenCache`) are causal and the slots of a context are not, so each set
is attended to by itself, and the results are merged by their log-sum-exp. Query heads of one KV
head are stacked as queries, so keys and values are never repeated; the bias of a slot is broadcast
over queries. Knows no model and no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from protokv.core.context import Context, KVSegment
from protokv.core.rotary import rotate
from protokv.core.tensors import TensorDict
from protokv.device import kernels
from protokv.device.answers import AnswerBuffer
from protokv.device.arrays import KeysValues, concat_rows
from protokv.errors import ConfigError

# The name of our attention in transformers, where `protokv.backbones.stream_cache` registers it.
ATTENTION_NAME = "protokv"


def attend(
    query: Tensor,
    segments: Sequence[KVSegment],
    local: KeysValues,
    scaling: float,
    causal: Tensor | None = None,
) -> Tensor:
    """Return attention `[Hq, T, D]` of `T` tokens over the slots of a context and over `n` local
    tokens.

    Query `i` of `[Hq, T, D]`, rotated, is local token `n - T + i`; `local` has keys and values `[H,
    n, D]`, n = 0 where they stand behind the slots. `scaling` is the factor on the logits, usually
    `D ** -0.5`. `causal` is `_causal_mask` of these sizes, if it is at hand.
    """
    heads, T, D = query.shape
    keys, values = local
    H, n = keys.shape[:2]
    stacked, wide = kernels.stack_queries(query, H)
    if causal is None:
        causal = _causal_mask(T, n, heads // H, query.device)
    parts = [kernels.compute_attention(stacked, keys, values, causal, scaling)] if n else []
    for segment in segments:
        if not segment.keys.shape[1]:
            continue
        turn, (rotated, own) = segment.query_rotation, (stacked, wide)
        if turn is not None:
            rotated = rotate(stacked, turn).to(query.dtype)
            own = None
        parts.append(
            kernels.compute_biased_attention(
                rotated, segment.keys, segment.values, segment.bias, scaling, own
            )
        )
    if T == 1 and len(parts) == 2 and query.device.type == "cpu":
        return kernels.merge_attention_pair(*parts).reshape(heads, T, D)
    return kernels.merge_attention(parts, heads // H)


def _causal_mask(queries: int, tokens: int, groups: int, device: torch.device) -> Tensor | None:
    """Return the mask of the last `queries` of some tokens, `[1, groups * queries, tokens]`
    float32; None: no need.
    """
    if queries == 1:
        return None
    mask = torch.full((groups, queries, tokens), -torch.inf, device=device).triu_(
        tokens - queries + 1
    )
    return mask.view(1, groups * queries, tokens)


class AttentionMasks:
    """The masks of a forward, as `attend` takes them, each made once for all layers on a device."""

    def __init__(self) -> None:
        self._made: dict[torch.device, tuple[tuple[object, ...], Tensor | None, Tensor | None]] = {}

    def __call__(self, mask: Tensor | None, query: Tensor, keys: Tensor) -> Tensor | None:
        """Return a mask for `attend` with these query and local keys.

        `mask` is `[queries, tokens]` bool, True where a token is seen, or float, added to the
        logits; None is causal.
        """
        if mask is None and query.shape[1] == 1:
            return None
        (heads, queries, _), (H, tokens, _), device = query.shape, keys.shape, query.device
        groups = heads // H
        held = self._made.get(device)
        wanted = queries, tokens, groups, None if mask is None else mask.data_ptr()
        if held is None or held[0] != wanted:
            if mask is None:
                made = _causal_mask(queries, tokens, groups, device)
            elif mask.dtype == torch.bool:
                made = (
                    torch.zeros(mask.shape, device=device)
                    .masked_fill_(~mask, -torch.inf)
                    .repeat(groups, 1)[None]
                )
            else:
                made = mask.float().repeat(groups, 1)[None]
            # The mask is held, so that no other has its address.
            held = self._made[device] = (
                wanted,
                mask,
                None if made is None else kernels.fit_mask(made, query),
            )
        return held[2]


@dataclass(frozen=True, slots=True)
class ContextReaders:
    """Tokens, one after the other among those being forwarded, that read one context."""

    context: Context
    tokens: slice
    # tokens of `local` that each of them sees, `[T, n]` bool; None: causal
    seen: Tensor | None = None
    local: slice = field(default_factory=lambda: slice(None))
    masks: AttentionMasks = field(default_factory=AttentionMasks)


class LayerTokenCache:
    """Keys and values of the n tokens of one layer since a context was taken."""

    answer: AnswerBuffer | None = None  # has room for a whole answer; None: keys and values grow

    keys: Tensor | None  # `[..., H, n, D]`, on the device of the layer; None before the first
    values: Tensor | None

    def __init__(self, number: int) -> None:
        self.number = number  # which one it is of the layers that a memory serves
        self.clear()

    def clear(self) -> None:
        """Forget all tokens."""
        self.keys = None
        self.values = None
        self.length = 0
        # the segments that the present forward reads of the context; None: nothing has read the
        # keys that came last
        self._segments: Sequence[KVSegment] | None = None

    def append(self, keys: Tensor, values: Tensor) -> KeysValues:
        """Add `[..., H, T, D]`, rotated as the model made them; return all, `[..., H, n, D]`, or
        all that there is room for.
        """
        if self.answer is not None:
            keys, values = self.answer.write(self.number, keys, values)
        else:
            if self.keys is not None and self.values is not None:
                keys = torch.cat((self.keys, keys), -2)
                values = torch.cat((self.values, values), -2)
            self.length = keys.shape[-2]
        self.keys = keys
        self.values = values
        self._segments = None
        return keys, values

    def read(self) -> KeysValues:
        """Return keys and values `[H, n, D]` of all its tokens."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys.flatten(0, -3), self.values.flatten(0, -3)

    def keep(self, rows: Sequence[int]) -> None:
        """Forget all tokens but those in these rows."""
        if self.keys is not None and self.values is not None:
            chosen = torch.tensor(rows, dtype=torch.int64, device=self.keys.device)
            self.keys = self.keys.index_select(-2, chosen)
            self.values = self.values.index_select(-2, chosen)
            self.length = len(rows)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens. ValueError if there are not so many."""
        n = abs(tokens_to_remove)
        if n > self.length:
            raise ValueError(
                f"only the {self.length} tokens since the last commit can be removed, not {n}"
            )
        if n and self.keys is not None and self.values is not None:
            self.keys = self.keys[..., :-n, :]
            self.values = self.values[..., :-n, :]
            self.length = self.length - n


class TokenCache:
    """The tokens forwarded since a context was taken, in each layer.

    While watching these are a step, until the memory has it. A question is forwarded with a fork,
    which is dropped: this is why asking changes nothing. Models of transformers have
    `protokv.backbones.stream_cache.StreamCache`.
    """

    # layers that the memory serves; in a `StreamCache` transformers' own are among them
    layers: list[Any]
    # all that the work of a fork depends on besides the data of tensors that stay where they are
    key: Hashable = None
    # a list for the queries that read the context, `[Hq, T, D]` of each layer
    queries: list[Tensor] | None = None
    # who reads which context, in order, of the tokens being forwarded; empty: all read `context`
    readers: Sequence[ContextReaders] = ()
    # called in place of attention, with a query, and (number, kv, scaling) as `attend` takes them
    outside: Callable[..., Tensor] | None = None

    def __init__(self, layers: int) -> None:
        self.layers = [LayerTokenCache(number) for number in range(layers)]
        self.context: Context = Context()  # the tokens that new ones attend to besides each other
        self.masks = AttentionMasks()

    @property
    def memory_layers(self) -> Sequence[LayerTokenCache]:
        """The layers that a memory serves, L."""
        return self.layers

    @property
    def length(self) -> int:
        """Tokens forwarded so far, n."""
        return self.memory_layers[-1].length

    def fork(self, context: Context | None = None) -> Self:
        """Return another with the same tokens, which reads `context`; what it takes stays its
        own.
        """
        other = copy(self)
        other.masks = AttentionMasks()
        other.layers = [other._fork_layer(layer) for layer in self.layers]
        if context is not None:
            other.context = context
        return other

    def _fork_layer(self, layer: Any) -> Any:
        """Return a layer for this cache, with the same tokens; they are not copied."""
        return copy(layer)

    def attend(self, number: int, query: Tensor, kv: KeysValues | None, scaling: float) -> Tensor:
        """Append keys and values `[H, T, D]` to a layer, unless it has them, and attend with `[Hq,
        T, D]` as `read_layer` does.
        """
        layer = self.memory_layers[number]
        keys, values = layer.read() if kv is None else layer.append(*kv)
        return self.read_layer(layer, query, keys, values, None, scaling)

    def read_layer(
        self,
        layer: LayerTokenCache,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        scaling: float,
    ) -> Tensor:
        """Attend with `[Hq, T, D]`, rotated, to the context in place, and to the tokens `[H, n, D]`
        of a layer.

        `layer` has taken `keys` and `values`; `mask` is as `AttentionMasks` takes it, `scaling` the
        factor on logits.
        """
        # A forward of several streams attends outside; an answer with a buffer attends in it.
        if self.outside is not None:
            kv = (keys, values) if layer._segments is None else None
            layer._segments = ()
            return self.outside(query, (layer.number, kv, scaling))
        answer = layer.answer
        if answer is not None and answer.sees_slots(query, scaling):
            return answer.attend(layer.number, query, scaling)
        # Attention is the same in any order of features that both sides share.
        query = self.to_halves(query)
        keys = self.to_halves(keys)
        if layer._segments is None:
            # Layers that share these keys read what this one has read.
            if self.queries is not None:
                self.queries.append(query)
            layer._segments = () if self.readers else self.context.at(layer.number, query)
        if self.readers:
            parts = []
            for one in self.readers:
                own = query[:, one.tokens]
                seen = None if one.seen is None else one.seen.to(own.device)
                local = keys[:, one.local], values[:, one.local]
                made = one.masks(seen, own, local[0])
                read = one.context.at(layer.number, own)
                parts.append(attend(own, read, local, scaling, made))
            return concat_rows(parts, 1)
        mask = self.masks(mask if answer is None else answer.mask, query, keys)
        return attend(query, layer._segments, (keys, values), scaling, mask)

    def to_halves(self, x: Tensor) -> Tensor:
        """Return `[..., D]` with the features of rotated pairs half a key apart."""
        return x

    def read_all(self) -> KeysValues:
        """Return keys and values of all layers, `[L, H, n, D]` each, on one device. ConfigError:
        sizes differ.
        """
        each = [layer.read() for layer in self.memory_layers]
        if len({keys.shape for keys, _ in each}) > 1:
            raise ConfigError(
                "its layers with full attention differ in size, so one memory cannot serve them"
            )
        device = each[0][0].device
        keys, values = (
            torch.stack([part.to(device) for part in parts]).detach()
            for parts in zip(*each, strict=True)
        )
        return self.to_halves(keys), values

    def settle(self) -> None:
        """Forget the tokens, which the memory has taken."""
        for layer in self.memory_layers:
            layer.clear()

    def take(self, other: Self, tokens: int = 0) -> None:
        """Go on from a settled fork, or `tokens` later."""

    def tensors(self) -> TensorDict:
        """Return what layers hold that the memory does not serve, as `protokv.core.layers` names
        it.
        """
        return {}
