"""`HeldModel`: what a stream knows of a model of transformers that somebody has loaded.

Its files say which model it is, if they are here and its weights are theirs; else a sample of its
weights does.
"""

from __future__ import annotations

from inspect import signature
from typing import Any
from weakref import WeakValueDictionary, finalize

import torch
from torch import Tensor

from protokv.backbones.decoder import LanguageDecoder, require_model_object
from protokv.backbones.loading import identify_held_model
from protokv.backbones.registry import find_family
from protokv.backbones.stream_cache import CACHE_ARGUMENT, StreamCache, StreamCacheLayer
from protokv.core.attention import ATTENTION_NAME
from protokv.core.backbone import StreamModel
from protokv.core.modes import plain_tensors
from protokv.core.rotary import Angles
from protokv.core.tensors import Tensors
from protokv.errors import ConfigError, ProtoKVError
from protokv.machine import is_out_of_memory
from protokv.texts import Keywords

_ARGUMENTS = ("cache", "past_key_values")


class HeldModel(LanguageDecoder, StreamModel):
    """A decoder, and what its first keys tell of its layers."""

    def __init__(self, model: Any) -> None:
        """Read a model, set its attention, and try it with a token.

        ConfigError: it is no model, it is being trained, or no memory serves its layers or its
        attention.
        """
        require_model_object(model)
        if model.config.is_encoder_decoder:
            raise ConfigError(
                f"{type(model).__name__} reads an encoder as well, which no memory holds",
                hint="use a model that has a decoder alone",
            )
        self.config = model.config.get_text_config(decoder=True)
        before = self.config._attn_implementation
        try:
            self.layer_kinds = [kind for kind, _ in StreamCache(self).kinds]
            super().__init__(model)
            self._use_our_attention()
            self._probe()
        except Exception as error:  # code of any model may raise any error
            if self.config._attn_implementation != before:
                self.module.set_attn_implementation(before)
            if isinstance(error, ProtoKVError) or is_out_of_memory(error):
                raise
            what = f"{type(error).__name__}: {error}".splitlines()[0]
            raise ConfigError(
                f"{type(model).__name__} does not forward a token as expected ({what})",
                hint="use another model",
            ) from error
        family = find_family(model.config.model_type)
        self.frames_per_step, self.default_fps = family.read_rate(model.config)
        self.settings = {}
        self._hooks = _HOOKS.get(id(model)) or _Hooks(model, self.module)

    def __deepcopy__(self, memo: dict[int, Any]) -> HeldModel:
        """Return itself: a copied stream goes on with the same model."""
        return self

    def _probe(self) -> None:
        """Forward a token at two positions, to see what its layers make of it. ConfigError."""
        layers: list[StreamCacheLayer] = []

        @plain_tensors()
        def read(position: int) -> Tensor:
            cache = StreamCache(self)
            place = torch.full((1, self.position_components), position, device=device)
            ids = torch.full((1, 1), len(weight) // 2, device=device)
            where = {"position_ids": self.to_ids(place), CACHE_ARGUMENT: cache}
            self.module(input_ids=ids, use_cache=True, **where)
            cache.check_read()
            layers[:] = cache.memory_layers
            return cache.read_all()[0]

        weight = self.module.get_input_embeddings().weight
        # Weights that are offloaded are on no device, and their hooks move what they are given.
        device = "cpu" if weight.is_meta else weight.device
        error = 0.1 if torch.finfo(weight.dtype).bits < 32 else 1e-3
        rotated = self.find_rotated(read, error)
        self._check_order(len(weight) // 2, device, error)
        keys = layers[0].read()[0]
        self.layers = len(layers)
        self.kv_heads, _, self.head_size = keys.shape
        self.dtype = keys.dtype
        self.layer_devices = [layer.device for layer in layers]
        self.device = self.layer_devices[0]
        self.rotated = rotated if len(set(rotated)) > 1 else None

    @plain_tensors()
    def _check_order(self, word: int, device: Any, error: float) -> None:
        """Refuse a decoder of which a token changes with the one after it. ConfigError."""
        ids = torch.tensor([[word, word - 1], [word, word + 1]], device=device)
        one, other = self.module(input_ids=ids, use_cache=False)[0][:, 0].float()
        if float((one - other).abs().max()) > error * float(one.abs().max()):
            raise ConfigError(
                f"tokens of {type(self.model).__name__} see later ones, which a stream has not",
                hint="use a model whose attention is causal",
            )

    def identify(self) -> None:
        """Find out which model this is; its weights may have changed."""
        self.identity = identify_held_model(self.model)

    def rotary(self, positions: Tensor) -> Angles:
        """Return the model's own angles."""
        return self.angles(positions)

    def _use_our_attention(self) -> None:
        """Let the decoder attend by `protokv`. ConfigError: transformers cannot set it."""
        if self.config._attn_implementation != ATTENTION_NAME:
            self.module.set_attn_implementation(ATTENTION_NAME)
        if self.config._attn_implementation != ATTENTION_NAME:
            raise ConfigError(
                f"the attention of {type(self.module).__name__} cannot be set",
                hint="use a model whose attention is a function of transformers",
            )

    def new_cache(self, held: Tensors | None = None, seen: int | None = None) -> StreamCache:
        """Return its layers before the first token, or as a state has them after `seen` tokens.
        StateCorrupt: another model left it.
        """
        cache = StreamCache(self)
        if held is not None:
            cache.load_layers(held, self.layer_devices_of_model(), seen)
        return cache


def _find_cache(named: Keywords) -> Any:
    """Return the cache of ours that a model was called with; None: there is none."""
    found = next((named[name] for name in _ARGUMENTS if named.get(name) is not None), None)
    return found if hasattr(found, "begin") else None


def _begin_call(module: Any, arguments: tuple[Any, ...], named: Keywords) -> None:
    """Tell a cache that a model is called."""
    if cache := _find_cache(named):
        if named.get("use_cache") is False:
            raise ConfigError(
                "use_cache=False reads the memory for the first token of an answer alone",
                hint="leave use_cache out",
            )
        cache.refuse_again(named.get("input_ids"))
        cache.begin(called=True)


def _begin_tokens(module: Any, arguments: tuple[Any, ...], named: Keywords) -> None:
    """Tell a cache where the tokens stand that a decoder is about to forward."""
    if arguments:
        named = signature(module.forward).bind_partial(*arguments).arguments | named
    if cache := _find_cache(named):
        ids = named.get("position_ids")
        # A row before those of M-RoPE counts tokens, for masks.
        rows = cache.decoder.position_components
        where = None if ids is None else ids[-rows:, 0].T if ids.ndim == 3 else ids[0, :, None]
        cache.begin(where, named.get("attention_mask"))


def _end_tokens(module: Any, arguments: Any, named: Keywords, output: Any) -> None:
    if cache := _find_cache(named):
        cache.end()


def _end_call(module: Any, arguments: Any, named: Keywords, output: Any) -> None:
    if cache := _find_cache(named):
        cache.end(called=True)


class _Hooks:
    """The hooks of a model, which go with the last cache of it."""

    def __init__(self, model: Any, decoder: Any) -> None:
        self._model = model  # so that no other model has its id
        _HOOKS[id(model)] = self
        for module, (begin, end) in ((model, _CALL), (decoder, _TOKENS)):
            # A copied model has those of the other one.
            for known in (module._forward_pre_hooks, module._forward_hooks):
                for key in [key for key, hook in known.items() if hook in (begin, end)]:
                    del known[key]
            finalize(self, module.register_forward_pre_hook(begin, with_kwargs=True).remove)
            finalize(self, module.register_forward_hook(end, with_kwargs=True).remove)


_CALL = (_begin_call, _end_call)
_TOKENS = (_begin_tokens, _end_tokens)
_HOOKS = WeakValueDictionary[int, _Hooks]()
