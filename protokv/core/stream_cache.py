"""`StreamCache`: the layers of a decoder of transformers while it forwards tokens after a context.

Layers with full attention (`MemoryLayer`) read the context, and the tokens since it was taken. All other layers
(sliding, linear, convolution, shared) are transformers' own. A memory layer returns its keys with an attribute that
names the layer, so that our attention function finds it without arguments of the model, and in layers that share keys.

There are two ways to attend. With `attn_implementation="protokv"` slots and their bias are read in place: this is the
fast one. With `sdpa` or `eager` a layer returns `[slots | new tokens]` and hands the bias to transformers' function.

Letters: L layers, H KV heads, Hq query heads, n tokens since the context was taken, N slots, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from inspect import signature
from typing import Any, Final
from weakref import ref

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, GenerationMixin
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, LinearAttentionCacheLayerMixin
from transformers.integrations import sdpa_attention
from transformers.masking_utils import sdpa_mask

from protokv.core.attention import NAME, Masks, attend
from protokv.core.context import Context, EmptyContext, Segment
from protokv.core.hybrid import HybridState
from protokv.core.layers import LayerKind
from protokv.errors import ConfigError

ARGUMENT: Final = "cache" if "cache" in signature(GenerationMixin.prepare_inputs_for_generation).parameters else (
    "past_key_values"
)  # fmt: skip
"""The argument of a model that takes a cache; transformers renamed it in 5.24."""
USE_OURS: Final = 'load the model with attn_implementation="protokv"'
# The attribute of the keys that a memory layer returns: the layer. Attention finds it there, in shared layers too.
_LAYER: Final = "protokv_layer"


class MemoryLayer(CacheLayerMixin):  # type: ignore[misc]
    """A layer with full attention: what the memory shows of it, and the tokens since the last commit.

    Attributes:
        number: which one it is of the layers that the memory serves.
        length: n.
        keys, values: of these tokens, `[1, H, n, D]`; None before the first.
    """

    is_sliding = False
    is_croppable = True
    keys: Tensor | None
    values: Tensor | None

    def __init__(self, owner: StreamCache, number: int) -> None:
        super().__init__()
        self.owner, self.number, self.length = owner, number, 0
        # Keys and values with room for more tokens than there are, and what the present forward reads of the context.
        self._room: tuple[Tensor, Tensor] | None = None
        self._segments: Sequence[Segment] | None = None

    @property
    def owner(self) -> StreamCache:
        """The cache of the layer. It is not kept alive: a step on a device would stay until Python looks for cycles."""
        owner = self._owner()
        assert owner is not None, "the cache of this layer is gone"
        return owner

    @owner.setter
    def owner(self, owner: StreamCache) -> None:
        self._owner = ref(owner)

    def fork(self, owner: StreamCache) -> MemoryLayer:
        """Return a layer of another cache with the same tokens; nothing is copied until it takes more."""
        other = MemoryLayer(owner, self.number)
        other.length, other.keys, other.values = self.length, self.keys, self.values
        if self.is_initialized:
            other.dtype, other.device, other.is_initialized = self.dtype, self.device, True
        return other

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take dtype and device of the first tokens.

        Raises:
            ConfigError: no memory serves such keys and values.
        """
        if key_states.shape[0] != 1:
            raise ConfigError(
                f"the cache holds one stream, and the model was given a batch of {key_states.shape[0]}",
                hint="forward one stream at a time, without beams",
            )
        if key_states.shape[3] != value_states.shape[3]:
            raise ConfigError(
                "keys and values of this model differ in size (latent attention), which no memory serves",
                hint="use a model with keys and values of one size",
            )
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, kwargs: dict[str, Any] | None = None, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Take keys and values `[1, H, T, D]`; return what the layer attends to, `[1, H, N + n, D]`.

        Args:
            key_states: rotated, as the model made them.
            value_states: theirs.
            kwargs: the arguments of the attention function, which gets the bias of the slots through them.

        Raises:
            ConfigError: no memory serves such keys and values, or the bias does not reach the attention function.
        """
        if not self.is_initialized or key_states.shape[0] != 1:
            self.lazy_initialization(key_states, value_states)
        local, self._segments = self._append(key_states, value_states), None
        if self.owner.reads_in_place:
            keys = local[0][:]
            setattr(keys, _LAYER, self)
            return keys, local[1]
        slots = self.owner.slots(self.number)
        if slots is None:
            return local
        if kwargs is None:
            raise ConfigError("this model hands no bias to its attention", hint=USE_OURS)
        bias = torch.cat((slots.bias, slots.bias.new_zeros(slots.bias.shape[0], self.length)), 1)
        groups = self.owner.query_heads // key_states.shape[1]
        # Half precision has no number as low as `EMPTY`.
        bias = bias.clamp(min=torch.finfo(key_states.dtype).min / 2).to(key_states.dtype)
        each = bias.repeat_interleave(groups, 0)[None, :, None]
        kwargs["position_bias"] = each.expand(1, -1, key_states.shape[2], -1)
        return torch.cat((slots.keys[None], local[0]), 2), torch.cat((slots.values[None], local[1]), 2)

    def _append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put `[1, H, T, D]` after the tokens since the last commit; return all of these, `[1, H, n, D]`."""
        start, self.length = self.length, self.length + keys.shape[2]
        if not start:
            # A whole step is kept as the model made it.
            self.keys, self.values = keys, values
            return keys, values
        if self._room is None or self._room[0].shape[2] < self.length:
            size = (*keys.shape[:2], max(2 * start, self.length + 32), keys.shape[3])
            room = keys.new_empty(size), values.new_empty(size)
            for new, old in zip(room, (self.keys, self.values), strict=True):
                assert old is not None
                new[:, :, :start] = old
            self._room = room
        keys_room, values_room = self._room
        keys_room[:, :, start : self.length], values_room[:, :, start : self.length] = keys, values
        self.keys, self.values = keys_room[:, :, : self.length], values_room[:, :, : self.length]
        return self.keys, self.values

    @torch.no_grad()
    def attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
        """Attend to the slots in place, and to the new tokens; nothing can be trained through it.

        Args:
            query: `[Hq, T, D]`, rotated.
            keys: `[H, n, D]`, as `update` returned them.
            values: theirs.
            mask: `[T, n]`, as transformers made it: True or 0 where a token is seen; None: every token sees those
                before it, and the queries are the last ones.
            scaling: the factor on the logits.

        Returns:
            `[Hq, T, D]`.
        """
        owner = self.owner
        # Attention is the same in any order of features that both sides share.
        query, keys = owner.to_halves(query), owner.to_halves(keys)
        if self._segments is None:
            # Layers that share these keys read what this one has read.
            self._segments = owner.context.at(self.number, query)
        groups = query.shape[0] // keys.shape[0]
        mask = owner.masks(mask, query.shape[1], keys.shape[1], groups, query.device)
        return attend(query, self._segments, (keys, values), scaling, mask)

    def clear(self) -> None:
        """Forget the tokens since the last commit."""
        self.keys, self.values, self._room, self._segments, self.length = None, None, None, None, 0

    def reset(self) -> None:
        """Forget the tokens since the last commit; transformers' name for it."""
        self.clear()

    def get_seq_length(self) -> int:
        """Return how many tokens came so far; more than are held."""
        return self.owner.seen + self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys a mask has, and the place of the first in the stream."""
        if not query_length and self.owner.seen:
            raise ConfigError(
                "transformers took new tokens for a conversation that the cache has seen; use cache.question(inputs)",
                hint="an attention_mask of the whole length tells it that they are new",
            )
        slots = self.owner.slots(self.number)
        held = 0 if slots is None else slots.keys.shape[1]
        return held + self.length + query_length, self.owner.seen - held

    def get_max_length(self) -> int:
        """Return -1: any number of tokens may come."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, of those since the last commit.

        Raises:
            ValueError: there are not so many.
        """
        n = abs(tokens_to_remove)
        if n > self.length:
            raise ValueError(f"only the {self.length} tokens since the last commit can be removed, not {n}")
        if n:
            assert self.keys is not None
            assert self.values is not None
            self.length -= n
            self.keys, self.values, self._room = self.keys[:, :, :-n], self.values[:, :, :-n], None


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers calls it: query `[1, Hq, T, D]`, key and value `[1, H, n, D]`; returns `[1, T, Hq, D]`.

    Keys that no memory returned go to transformers' own function: those of sliding layers, of vision towers, and of a
    model that is used without a memory.
    """
    layer: MemoryLayer | None = getattr(key, _LAYER, None)
    if layer is None:
        out: tuple[Tensor, None] = sdpa_attention.sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return out
    mask = None if attention_mask is None else attention_mask[0, 0]
    attended = layer.attend(query[0], key[0], value[0], mask, query.shape[-1] ** -0.5 if scaling is None else scaling)
    return attended.transpose(0, 1).unsqueeze(0), None


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, sdpa_mask)


@dataclass(frozen=True, slots=True)
class CacheSlots:
    """The slots in use of a layer, for attention that reads them as keys: `[H, N, D]` twice, and a bias `[H, N]`."""

    keys: Tensor
    values: Tensor
    bias: Tensor


class StreamCache(TransformersCache):  # type: ignore[misc]
    """The layers of a decoder while tokens are forwarded after a context. `Backbone.forward` fills one.

    Attributes:
        query_heads: Hq.
        context: what new tokens attend to besides each other.
        seen: tokens before these, as masks count.
        masks: as attention takes them.
    """

    reads_in_place = True

    def __init__(self, config: Any, hybrid: HybridState | None = None) -> None:
        """Make the layers of the decoder of a config, which hold what `hybrid` has of them.

        Raises:
            ConfigError: the model has layers that no memory serves.
        """
        layers: list[Any] = []
        for layer in DynamicCache(config=config).layers:
            own = type(layer) is DynamicLayer
            if not own and isinstance(layer, DynamicLayer) and not layer.is_sliding:
                raise ConfigError(
                    f"it has layers of the kind {type(layer).__name__}, whose tokens no memory can hold",
                    hint="use a model of which each layer has full, sliding or linear attention",
                )
            layers.append(MemoryLayer(self, sum(isinstance(one, MemoryLayer) for one in layers)) if own else layer)
        super().__init__(layers=layers)
        if not self.memory_layers:
            raise ConfigError(
                "none of its layers has full attention, so a memory has nothing to serve",
                hint="use a checkpoint with layers of full attention",
            )
        self.query_heads: int = config.num_attention_heads
        self.context: Context = EmptyContext()
        self.masks, self._hybrid = Masks(), hybrid
        self.seen = 0
        if hybrid is not None:
            self.seen = restore_layers(self.layers, hybrid.held)

    @property
    def memory_layers(self) -> list[MemoryLayer]:
        """The layers that a memory serves."""
        return [layer for layer in self.layers if isinstance(layer, MemoryLayer)]

    @property
    def hybrid(self) -> HybridState | None:
        """What the other layers hold now; None if there are none."""
        if self._hybrid is None:
            return None
        found = self._hybrid.fork()
        found.held = layer_tensors(self.layers)
        return found

    @property
    def length(self) -> int:
        """Tokens forwarded so far, n."""
        return self.memory_layers[-1].length

    def read(self, number: int) -> tuple[Tensor, Tensor]:
        """Return keys and values `[H, n, D]` of one layer that the memory serves, on its device."""
        layer = self.memory_layers[number]
        assert layer.keys is not None
        assert layer.values is not None
        return layer.keys[0], layer.values[0]

    def read_all(self) -> tuple[Tensor, Tensor]:
        """Return keys, rotated as the model made them, and values of all layers, `[L, H, n, D]` each, on one device.

        Raises:
            ConfigError: the layers differ in size.
        """
        each = [self.read(number) for number in range(len(self.memory_layers))]
        if len({keys.shape for keys, _ in each}) > 1:
            raise ConfigError("its layers with full attention differ in size, so one memory cannot serve them")
        device = each[0][0].device
        keys, values = (torch.stack([part.detach().to(device) for part in parts]) for parts in zip(*each, strict=True))
        return keys, values

    def slots(self, number: int) -> CacheSlots | None:
        """Return the slots of a layer that are to be read as keys; None: none are."""
        return None

    def to_halves(self, x: Tensor) -> Tensor:
        """Return `[..., D]` with the features of rotated pairs half a key apart."""
        return x


def fork_layer(layer: Any) -> Any:
    """Return a copy of one of transformers' own layers. States that it writes in place are copied."""
    other = copy(layer)
    for name, held in vars(layer).items():
        if isinstance(held, dict):
            fresh = {i: one.clone() if isinstance(one, Tensor) else one for i, one in held.items()}
            setattr(other, name, fresh)
    return other


def find_kind(layer: Any) -> tuple[LayerKind, bool]:
    """Return the kind of a layer, and whether it shares the tokens of an earlier one, whose kind it does not tell."""
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        return LayerKind.LINEAR, False
    if isinstance(layer, CacheLayerMixin):
        return (LayerKind.SLIDING if layer.is_sliding else LayerKind.FULL), False
    return LayerKind.FULL, True


def layer_tensors(layers: Sequence[Any]) -> dict[str, Tensor]:
    """Return what transformers' own layers hold, by the number of the layer and the name that transformers has for it.

    Keys and values are `[H, n, D]`.
    """
    found: dict[str, Tensor] = {}
    for i, layer in enumerate(layers):
        if isinstance(layer, MemoryLayer):
            continue
        for name in ("keys", "values"):
            held = getattr(layer, name, None)
            if held is not None and held.numel():
                found[f"layers.{i}.{name}"] = held[0]
        for name in ("conv_states", "recurrent_states"):
            states = getattr(layer, name, {})
            found |= {f"layers.{i}.{name}.{n}": held for n, held in states.items() if held is not None}
    return found


def restore_layers(layers: Sequence[Any], tensors: Mapping[str, Tensor], seen: int | None = None) -> int:
    """Give transformers' own layers what `layer_tensors` returned; states, which they write to, are copied.

    Args:
        layers: of a new cache.
        tensors: by name.
        seen: tokens before these, as masks count; None: as many as a window holds.

    Returns:
        `seen`.

    Raises:
        KeyError, ValueError, IndexError, AttributeError: these layers hold nothing of that name.
    """
    for name, held in tensors.items():
        _, number, kind, *rest = name.split(".")
        layer = layers[int(number)]
        if kind in ("keys", "values"):
            if not layer.is_initialized:
                layer.lazy_initialization(held[None], held[None])
            setattr(layer, kind, held[None])
            seen = held.shape[1] if seen is None else seen
            layer.cumulative_length = seen
            continue
        states, n = getattr(layer, kind), int(rest[0])
        states[n] = held.clone()
        getattr(layer, f"is_{kind}_initialized")[n] = layer.has_previous_state[n] = True
        if kind == "conv_states":
            layer.conv_kernel_size[n] = held.shape[-1]
        layer.dtype, layer.device = held.dtype, held.device
    return seen or 0
