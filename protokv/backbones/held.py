"""`HeldModel`: what a stream knows of a model of transformers that somebody has loaded.

Its files say which model it is, if they are here and its weights are theirs; else a sample of its
weights does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from protokv.backbones.decoder import LanguageDecoder
from protokv.backbones.loading import Placement, identify_held_model, identify_model
from protokv.backbones.registry import find_family
from protokv.backbones.stream_cache import StreamCache, StreamCacheLayer
from protokv.core.backbone import BackboneIdentity
from protokv.core.rotary import PreciseRotary, Rotary
from protokv.errors import StateCorrupt


class HeldModel(LanguageDecoder):
    """A decoder, and what its first keys tell of its layers."""

    layers: int  # L, those with full attention, as in the next three
    kv_heads: int  # H
    head_size: int  # D
    dtype: torch.dtype  # of keys and values
    device: torch.device  # of its first layer with full attention
    layer_devices: Sequence[torch.device] | None  # of each of these layers

    def __init__(self, model_or_config: Any) -> None:
        """Read a model, or a config. ConfigError: it is neither."""
        super().__init__(model_or_config)
        self._whole = model_or_config if self.model is None else self.model.config
        family = find_family(self._whole.model_type)
        self.frames_per_step, self.default_fps = family.read_rate(self._whole)
        self.settings: Mapping[str, Any] = {}
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
        """Which model this is; of a config alone, by its architecture."""
        if self.model is not None:
            return identify_held_model(self.model)
        name = self._whole.name_or_path or self._whole.model_type
        return identify_model(name, name, self._whole, Placement(self.dtype, self.device), "")

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
