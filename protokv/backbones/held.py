"""`HeldModel`: what a stream knows of a model of transformers that somebody has loaded.

Its files say which model it is, if they are here and its weights are theirs; else a sample of its
weights does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any, Final
from weakref import finalize

import torch
from torch import Tensor

from protokv.backbones.decoder import LanguageDecoder
from protokv.backbones.loading import identify_held_model
from protokv.backbones.registry import find_family
from protokv.backbones.stream_cache import StreamCache, StreamCacheLayer
from protokv.core.attention import ATTENTION_NAME
from protokv.core.backbone import BackboneIdentity
from protokv.core.layers import LayerKind
from protokv.core.rotary import PreciseRotary, Rotary
from protokv.errors import ConfigError, StateCorrupt

_ARGUMENTS: Final = ("cache", "past_key_values")


class HeldModel(LanguageDecoder):
    """A decoder, and what its first keys tell of its layers."""

    layers: int  # L, those with full attention, as in the next three
    kv_heads: int  # H
    head_size: int  # D
    dtype: torch.dtype  # dtype of keys and values
    device: torch.device  # device of its first layer with full attention
    layer_devices: Sequence[torch.device] | None  # device of each of these layers

    layer_kinds: Sequence[LayerKind]  # kinds of all its layers

    def __init__(self, model: Any) -> None:
        """Read a model. ConfigError: it is none, or no memory serves its layers."""
        super().__init__(model)
        family = find_family(model.config.model_type)
        self.frames_per_step, self.default_fps = family.read_rate(model.config)
        self.settings: Mapping[str, Any] = {}
        # The hook goes with the last cache of the model.
        hook = self.module.register_forward_pre_hook(_tell_positions, with_kwargs=True)
        finalize(self, hook.remove)
        self.layer_kinds = [kind for kind, _ in self.new_cache().kinds]

    def __deepcopy__(self, memo: dict[int, Any]) -> HeldModel:
        """Return itself: a copied stream goes on with the same model."""
        return self

    def learn(self, keys: Tensor, devices: Sequence[torch.device] | None = None) -> None:
        """Read sizes and dtype off keys `[L, H, n, D]`.

        `devices` are those of the layers with full attention; None: as the model is placed.
        StateCorrupt: it has not so many of these layers.
        """
        layers = self.new_cache().layers
        own = [i for i, layer in enumerate(layers) if isinstance(layer, StreamCacheLayer)]
        self.layers, self.kv_heads, _, self.head_size = keys.shape
        if self.layers != len(own):
            raise StateCorrupt(f"the state has {self.layers} layers, the model has {len(own)}")
        self.dtype = keys.dtype
        placed = self.layer_devices_of_model()
        self.layer_devices = [placed[i] for i in own] if devices is None else devices
        self.device = self.layer_devices[0]

    @property
    def rotary(self) -> Rotary:
        """The model's own angles."""
        return self.angles

    @property
    def precise_rotary(self) -> PreciseRotary:
        """The same angles, without their rounding."""
        return PreciseRotary(self.angles, self.position_components)

    @property
    def identity(self) -> BackboneIdentity:
        """Which model this is."""
        return identify_held_model(self.model)

    def use_our_attention(self) -> None:
        """Let the decoder attend by `protokv`. ConfigError: transformers cannot set it."""
        if self.config._attn_implementation != ATTENTION_NAME:
            self.module.set_attn_implementation(ATTENTION_NAME)
        if self.config._attn_implementation != ATTENTION_NAME:
            why = f"the attention of {type(self.module).__name__} cannot be set"
            raise ConfigError(why, hint="use a model whose attention is a function of transformers")

    def new_cache(
        self, held: Mapping[str, Tensor] | None = None, seen: int | None = None
    ) -> StreamCache:
        """Return its layers before the first token, or as a state has them after `seen` tokens.
        StateCorrupt: another model left it.
        """
        cache = StreamCache(self)
        if held is not None:
            cache.load_layers(held, self.layer_devices_of_model(), seen)
        return cache


def _tell_positions(module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Tell a cache where the tokens stand that a decoder is about to forward; the model runs as
    before.

    A copied model has the hook twice, and the second call tells the same.
    """
    if arguments:
        named = signature(module.forward).bind_partial(*arguments).arguments | named
    cache: Any = next((named[name] for name in _ARGUMENTS if named.get(name) is not None), None)
    if not hasattr(cache, "expect"):
        return
    ids = named.get("position_ids")
    # The first of four rows counts tokens, for masks.
    cache.expect(None if ids is None else ids[-3:, 0].T if ids.ndim == 3 else ids[0, :, None])
