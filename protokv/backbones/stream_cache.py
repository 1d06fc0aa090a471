"""`StreamCache`: the layers of a decoder of transformers while it forwards tokens after a context.

Layers with full attention (`StreamCacheLayer`) read the context, and the tokens since it was taken;
all others are transformers' own. With `attn_implementation="protokv"` slots and their bias are read
in place: this is the fast way. Our attention function finds the layer in an attribute of its keys,
without arguments of the model, also in layers that share keys. With `sdpa` or `eager` a layer
returns `[slots | new tokens]` and hands the bias to transformers' function.

Letters: L layers, H KV heads, Hq query heads, n tokens since the context was taken, N slots, D head
size.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, GenerationMixin
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, LinearAttentionCacheLayerMixin
from transformers.integrations import sdpa_attention
from transformers.masking_utils import sdpa_mask

from protokv.backbones.decoder import LanguageDecoder
from protokv.core.attention import ATTENTION_NAME, AttentionMasks, LayerTokenCache, TokenCache
from protokv.core.context import Context
from protokv.core.layers import LAYER_KINDS, LayerKind, clean_layer_tensors, is_window_tensor
from protokv.core.tensors import TensorDict, Tensors
from protokv.device.arrays import KeysValues
from protokv.errors import ConfigError, StateCorrupt
from protokv.texts import Keywords

CACHE_ARGUMENT = (
    "cache"
    if "cache" in signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else ("past_key_values")
)
"""The argument of a model that takes a cache; transformers renamed it in 5.24."""
ATTENTION_HINT = 'set it by model.set_attn_implementation("protokv")'
_KNOWN = frozenset(
    {
        "assistant_tokenizer",
        "cache_position",
        "dropout",
        "is_causal",
        "logits_to_keep",
        "position_ids",
        "return_dict",
        "tokenizer",
        "use_cache",
    }
)
"""Keywords that change nothing where nothing is trained; `generate` hands on some of its own."""
_PLAIN = {"s_aux": "s_aux (sinks)", "softcap": "softcap (a cap of its scores)"}
_LAYER = "protokv_layer"  # the attribute of the keys that a memory layer returns: the layer


class StreamCacheLayer(LayerTokenCache, CacheLayerMixin):  # type: ignore[misc]
    """A layer with full attention, as transformers calls it; keys and values are `[1, H, n, D]`."""

    is_sliding = False
    is_croppable = True
    is_read = True  # whether attention has read what came last
    given: Tensor | None = None  # the values that attention is to read

    def __init__(self, owner: StreamCache, number: int) -> None:
        CacheLayerMixin.__init__(self)
        super().__init__(number)
        self.owner = owner

    @property
    def owner(self) -> StreamCache:
        """The cache of the layer. It is not kept alive: a step on a device would stay until Python
        looks for cycles.
        """
        owner = self._owner()
        assert owner is not None, "the cache of this layer is gone"
        return owner

    @owner.setter
    def owner(self, owner: StreamCache) -> None:
        self._owner = ref(owner)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take dtype and device of the first tokens. ConfigError: no memory serves such keys and
        values.
        """
        if key_states.shape[0] != 1:
            raise ConfigError(
                "the cache holds one stream, and the model was given a batch of "
                f"{key_states.shape[0]}",
                hint="forward one stream at a time, without beams",
            )
        if key_states.shape[3] != value_states.shape[3]:
            raise ConfigError(
                "keys and values of this model differ in size (latent attention), which no memory "
                "serves",
                hint="use a model with keys and values of one size",
            )
        self.dtype = key_states.dtype
        self.device = key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> KeysValues:
        """Take keys and values `[1, H, T, D]`; return all since the last commit, `[1, H, n, D]`.

        ConfigError: the attention of the model is not ours, or no memory serves such keys.
        """
        if not self.is_initialized or key_states.shape[0] != 1:
            self.lazy_initialization(key_states, value_states)
        if self.owner.decoder.config._attn_implementation != ATTENTION_NAME:
            raise ConfigError(
                "the attention of the model was changed, so it cannot read the memory",
                hint=ATTENTION_HINT,
            )
        if not self.number:
            self.owner.note(key_states.shape[2])
        self.is_read = False
        keys, values = self.append(key_states, value_states)
        keys = keys[:]
        setattr(keys, _LAYER, self)
        self.given = values
        return keys, values

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
                "transformers took new tokens for a conversation that the cache has seen; use "
                "cache.question(inputs)",
                hint="an attention_mask of the whole length tells it that they are new",
            )
        return self.length + query_length, self.owner.seen

    def get_max_length(self) -> int:
        """Return -1: any number of tokens may come."""
        return -1


def _attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers calls it: query `[1, Hq, T, D]`, key and value `[1, H, n, D]`; returns
    `[1, T, Hq, D]`.

    Keys that no memory returned go to transformers' own function: those of sliding layers, of
    vision towers, and of a model that is used without a memory. Nothing can be trained through
    slots.
    """
    layer: StreamCacheLayer | None = getattr(key, _LAYER, None)
    if layer is None:
        out: tuple[Tensor, None] = sdpa_attention.sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return out
    if value is not layer.given:
        raise ConfigError(
            f"{type(module).__name__} changes its values after the cache, so it reads no memory",
            hint="use another model",
        )
    if attention_mask is not None and attention_mask.shape[1] > 1:
        raise ConfigError(
            f"{type(module).__name__} has a mask for each head, which a memory leaves out",
            hint="use another model",
        )
    _check_keywords(module, kwargs)
    # Some models make their masks of all tokens so far; those that were committed are all seen.
    mask = None if attention_mask is None else attention_mask[0, 0, :, -key.shape[2] :]
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    with torch.no_grad():
        attended = layer.owner.read_layer(layer, query[0], key[0], value[0], mask, scaling)
    layer.is_read = True
    attended = attended.transpose(0, 1).unsqueeze(0)
    if query.requires_grad:
        attended = _Untrained.apply(attended, query)  # type: ignore[no-untyped-call]
    return attended, None


class _Untrained(torch.autograd.Function):
    """What attention over a memory returns, with no way back. ConfigError where one is sought."""

    @staticmethod
    def forward(context: Any, attended: Tensor, query: Tensor) -> Tensor:
        """Return it."""
        return attended.view_as(attended)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        """Refuse."""
        raise ConfigError("nothing is trained through a memory", hint="train without the cache")


def _check_keywords(module: Any, named: Keywords) -> None:
    """Refuse what a model hands to its attention and ours leaves out. ConfigError."""
    if module.training:
        raise ConfigError(
            "the model is being trained, and nothing is trained through a memory",
            hint="call model.eval()",
        )
    for name, value in named.items():
        if value is not None and name not in _KNOWN and not name.startswith("output_"):
            what = _PLAIN.get(name, name)
            raise ConfigError(
                f"{type(module).__name__} hands its attention {what}, which a memory leaves out",
                hint="use another model",
            )


AttentionInterface.register(ATTENTION_NAME, _attention_forward)
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)


class StreamCache(TokenCache, TransformersCache):  # type: ignore[misc]
    """The layers of a decoder of transformers while tokens are forwarded after a context."""

    seen: int  # tokens before these, as masks count

    def __init__(self, decoder: LanguageDecoder) -> None:
        """Make the layers of a decoder. ConfigError: it has layers that no memory serves."""
        self.decoder = decoder
        config = decoder.config
        layers: list[Any] = []
        for layer in DynamicCache(config=config).layers:
            own = type(layer) is DynamicLayer
            if not own and isinstance(layer, DynamicLayer) and not layer.is_sliding:
                raise ConfigError(
                    f"it has layers of the kind {type(layer).__name__}, whose tokens no memory can "
                    "hold",
                    hint="use a model of which each layer has full, sliding or linear attention",
                )
            number = sum(isinstance(one, StreamCacheLayer) for one in layers)
            layers.append(StreamCacheLayer(self, number) if own else layer)
        TransformersCache.__init__(self, layers=layers)
        if not self.memory_layers:
            raise ConfigError(
                "none of its layers has full attention, so a memory has nothing to serve",
                hint="use a checkpoint with layers of full attention",
            )
        named = getattr(config, "layer_types", None) or [""] * len(layers)
        # Each layer, and whether it shares the tokens of an earlier one.
        self.kinds = [_find_kind(layer, name) for layer, name in zip(layers, named, strict=True)]
        self.context = Context()
        self.masks = AttentionMasks()
        self.seen = 0
        # the tensors that transformers' own layers held when the tokens since then began
        self._settled: TensorDict = {}

    @property
    def memory_layers(self) -> list[StreamCacheLayer]:
        """The layers that a memory serves."""
        return [layer for layer in self.layers if isinstance(layer, StreamCacheLayer)]

    def _fork_layer(self, layer: Any) -> Any:
        """Return a copy of a layer; states that transformers writes in place are copied."""
        other = super()._fork_layer(layer)
        if isinstance(other, StreamCacheLayer):
            other.owner = self
            return other
        self.key = None
        for name, held in vars(layer).items():
            if isinstance(held, dict):
                fresh = {
                    i: one.clone() if isinstance(one, Tensor) else one for i, one in held.items()
                }
                setattr(other, name, fresh)
        return other

    def settle(self) -> None:
        """Forget the tokens, which the memory has taken; no number that is not finite stays in
        other layers.
        """
        self.seen += self.length
        super().settle()
        if len(self.memory_layers) < len(self.layers):
            self._settled = clean_layer_tensors(collect_layer_tensors(self.layers), self._settled)
            _restore_layers(self.layers, self._settled, self.seen)

    def take(self, other: StreamCache, tokens: int = 0) -> None:
        """Go on from a settled fork, or `tokens` later. Other layers' tensors are copied, in place
        where sizes stay.
        """
        self.seen = other.seen + tokens
        held = collect_layer_tensors(other.layers)
        for name, one in held.items():
            mine = self._settled.get(name) if self.key else None
            held[name] = one.clone() if mine is None or mine.shape != one.shape else mine.copy_(one)
        _restore_layers(self.layers, held, self.seen)
        self._settled = collect_layer_tensors(self.layers)
        # from here on it stays where it is
        self.key = tuple(one.shape for one in self._settled.values()) or None

    def tensors(self) -> TensorDict:
        """Return what layers hold that the memory does not serve; nothing if all have full
        attention.
        """
        if len(self.memory_layers) == len(self.layers):
            return {}
        kinds = torch.tensor([tuple(map(int, row)) for row in self.kinds], dtype=torch.int32)
        return {LAYER_KINDS: kinds} | collect_layer_tensors(self.layers)

    def load_layers(
        self, held: Tensors, devices: Sequence[torch.device], seen: int | None = None
    ) -> None:
        """Take what `tensors` returned, on any device, to the devices of all layers of the model.

        `seen` are the tokens before; None: as many as a window holds. StateCorrupt: another model
        left it.
        """
        own = self.tensors()
        if (own.get(LAYER_KINDS) is None) != (held.get(LAYER_KINDS) is None) or (
            own and not torch.equal(own[LAYER_KINDS], held[LAYER_KINDS])
        ):
            raise StateCorrupt(f"state: tensor {LAYER_KINDS} is not that of this model")
        try:
            self._settled = {
                name: one.to(devices[int(name.split(".")[1])])
                for name, one in held.items()
                if name != LAYER_KINDS
            }
            self.seen = _restore_layers(self.layers, self._settled, seen)
        except (KeyError, ValueError, IndexError, AttributeError) as error:
            raise StateCorrupt("the state has layers that this model has not") from error

    def check_read(self) -> None:
        """Refuse a model whose layers stored keys that its attention has not read as they were.
        ConfigError.
        """
        empty = [layer.number for layer in self.memory_layers if layer.keys is None]
        if empty:
            raise ConfigError(
                f"layer {empty[0]} stores no tokens of text, so a memory has nothing to serve",
                hint="use another model",
            )
        unread = [layer.number for layer in self.memory_layers if not layer.is_read]
        if unread:
            raise ConfigError(
                f"layer {unread[0]} changes its keys after the cache, so it reads no memory",
                hint="use another model",
            )

    def note(self, T: int) -> None:
        """Take note of `T` tokens that the first layer is about to store."""

    def to_halves(self, x: Tensor) -> Tensor:
        """Return `[..., D]` with the features of rotated pairs half a key apart."""
        return self.decoder.to_halves(x)


def _find_kind(layer: Any, name: str) -> tuple[LayerKind, bool]:
    """Return the kind of a layer, and whether it shares the tokens of an earlier one; then only its
    name tells.
    """
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        return LayerKind.LINEAR, False
    if isinstance(layer, CacheLayerMixin):
        return (LayerKind.SLIDING if layer.is_sliding else LayerKind.FULL), False
    return (LayerKind.SLIDING if name.startswith("sliding") else LayerKind.FULL), True


def collect_layer_tensors(layers: Sequence[Any]) -> TensorDict:
    """Return what transformers' own layers hold, as `protokv.core.layers` names it; keys and values
    `[H, n, D]`.
    """
    found: TensorDict = {}
    for i, layer in enumerate(layers):
        if isinstance(layer, StreamCacheLayer):
            continue
        for name in ("keys", "values"):
            held = getattr(layer, name, None)
            if held is not None and held.numel():
                found[f"layers.{i}.{name}"] = held[0]
        for name in ("conv_states", "recurrent_states"):
            states = getattr(layer, name, {})
            found |= {
                f"layers.{i}.{name}.{n}": held for n, held in states.items() if held is not None
            }
    return found


def _restore_layers(layers: Sequence[Any], tensors: Tensors, seen: int | None = None) -> int:
    """Give transformers' own layers what `collect_layer_tensors` returned; states, which they write
    to, are copied.

    Returns `seen`, tokens before these, as masks count; None: as many as a window holds. KeyError,
    ValueError, IndexError, AttributeError: these layers hold nothing of that name, or a shorter
    window.
    """
    for name, held in tensors.items():
        _, number, kind, *rest = name.split(".")
        layer = layers[int(number)]
        if is_window_tensor(name):
            if held.shape[1] >= layer.sliding_window:
                raise ValueError(f"{name} is longer than the window")
            if not layer.is_initialized:
                layer.lazy_initialization(held[None], held[None])
            setattr(layer, kind, held[None])
            seen = held.shape[1] if seen is None else seen
            layer.cumulative_length = seen
            continue
        states = getattr(layer, kind)
        n = int(rest[0])
        states[n] = held if held is states[n] else held.clone()
        getattr(layer, f"is_{kind}_initialized")[n] = layer.has_previous_state[n] = True
        if kind == "conv_states":
            layer.conv_kernel_size[n] = held.shape[-1]
        layer.dtype = held.dtype
        layer.device = held.device
    return seen or 0
