"""What a model of transformers says of its decoder: angles, positions, and the order of features in
a key.

Found in the model by its public `get_decoder`, whatever its family.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from inspect import signature, unwrap
from typing import Any

import torch
from torch import Tensor

from protokv.core.rotary import Angles, keep_still, rotate
from protokv.errors import ConfigError
from protokv.texts import Keywords

_PROBED = 5  # a position at which keys differ from those at position 0


def require_model_object(model: Any) -> None:
    """Refuse what is no model of transformers, such as a name or a config. ConfigError."""
    if not hasattr(model, "get_decoder"):
        raise ConfigError(
            f"expected a model of transformers that is loaded, got {type(model).__name__}",
            hint="give what from_pretrained returned",
        )


class LanguageDecoder:
    """The decoder of a model."""

    model: Any
    config: Any  # settings of its text
    position_components: int  # P, position components: those of M-RoPE, else 1

    def __init__(self, model: Any) -> None:
        """Read a model. ConfigError: it is none, or it rotates keys in a way that is not known."""
        require_model_object(model)
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        module = model.get_decoder()
        while (inner := module.get_decoder()) is not module:
            module = inner
        self.module: Any = module
        # Where kinds of layers have their own angles, those with full attention may have none.
        found = {
            name: one
            for name, one in module.named_modules()
            if type(one).__name__.endswith("RotaryEmbedding")
            and hasattr(one, "full_attention_inv_freq") >= hasattr(one, "layer_types")
        }
        # An encoder inside of it has its own, deeper down.
        nearest = min(found, key=lambda name: name.count("."), default="")
        self._rotary = found.get(nearest)
        sections = getattr(self._rotary, "mrope_section", None) or [1]
        if isinstance(sections, dict):  # of each kind of layer
            sections = sections.get("full_attention") or [1]
        self.position_components = len(sections)
        # The order of the model's angles in which those of a key's halves stand; None: as they are.
        self._angle_order: Tensor | None = None
        # At position 0 each cosine is 1; some models return the sines first.
        self._sine_first = False
        still = self.angles(torch.zeros(1, self.position_components, dtype=torch.int64))[0]
        self._sine_first = len(still[0]) > 0 and not bool(still.any())
        self._layout = self._find_layout(sys.modules[type(module).__module__])

    def angles(self, positions: Tensor) -> Angles:
        """Return cos and sin, `[..., R]` float32, of positions `[..., P]`, on their device; R is 0
        without angles.
        """
        if self._rotary is None:
            return keep_still(positions)
        ids = self.to_ids(positions.reshape(-1, positions.shape[-1]))
        device = next((one.device for one in self._rotary.buffers()), positions.device)
        named = (
            {"layer_type": "full_attention"}
            if "layer_type" in signature(self._rotary.forward).parameters
            else {}
        )
        # Without what renews its rates by the highest position: reading changes no model.
        turn = unwrap(type(self._rotary).forward)
        turned = turn(self._rotary, torch.zeros((), device=device), ids.to(device), **named)
        if not isinstance(turned, tuple):
            raise ConfigError(
                f"{type(self._rotary).__name__} gives complex angles, which no memory can undo",
                hint="use a model whose angles are a cosine and a sine",
            )
        both = torch.stack(turned)[:, 0]
        if self._sine_first:
            both = both.flip(0)
        factor = getattr(self._rotary, "attention_scaling", 1.0)
        factor = getattr(self._rotary, "full_attention_attention_scaling", factor)
        if factor != 1:
            # YaRN and LongRoPE lengthen keys, too; a key is lengthened once, not by each turn.
            both = both / factor
        if self._angle_order is not None:
            both = both[..., self._angle_order.to(both.device)]
        cos, sin = both.reshape(2, *positions.shape[:-1], both.shape[-1]).to(positions.device)
        return cos, sin

    @property
    def rates_stay(self) -> bool:
        """Whether the angle of a position is the same beside any other positions."""
        kind = str(getattr(self._rotary, "rope_type", ""))
        return "dynamic" not in kind and "longrope" not in kind

    def find_rotated(self, keys: Callable[[int], Tensor], dtype_error: float) -> list[bool]:
        """Return whether each layer rotates its keys; `keys` are those of a token at a position.

        A token that sees itself alone has the same keys at any position, but for their rotation.
        ConfigError: a layer turns them in another way, so no memory can undo it.
        """
        here = keys(0).float()
        there = keys(_PROBED).float()
        place = torch.full((1, self.position_components), _PROBED, device=here.device)
        turned = rotate(here, self.angles(place))
        found = []
        for layer, (own, still, moved) in enumerate(zip(there, here, turned, strict=True)):
            errors = [float((own - one).abs().max()) for one in (still, moved)]
            most = dtype_error * float(own.abs().max())
            # Learned positions are added, which changes the length of a key; they stay in it.
            added = self._rotary is None and float((own.norm() - still.norm()).abs()) > most
            if min(errors) > most and not added:
                raise ConfigError(
                    f"layer {layer} places keys in a way that no memory can undo",
                    hint="use a model with rotary positions, or with none",
                )
            found.append(errors[1] < errors[0])
        if not any(found):
            self._rotary = None
        return found

    def to_ids(self, positions: Tensor) -> Tensor:
        """Return positions `[T, P]` in transformers' shape: `[1, T]` for RoPE, `[P, 1, T]` for
        M-RoPE.
        """
        return positions.T if positions.shape[1] == 1 else positions.T[:, None]

    def position_ids(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return position ids `[P, 1, T]` of new tokens, from 0: of pictures by the model's own
        rule, else of text.
        """
        ids: Tensor = inputs["input_ids"]
        inner = getattr(self.model, "model", None)
        rule = getattr(self.model, "get_rope_index", None) or getattr(inner, "get_rope_index", None)
        if rule is None or not any(
            name.endswith(("grid_thw", "sizes", "sizes_videos")) for name in inputs
        ):
            return torch.arange(ids.shape[1], device=ids.device).expand(
                self.position_components, 1, -1
            )
        known = {
            name: value for name, value in inputs.items() if name in signature(rule).parameters
        }
        try:
            found: Tensor = rule(**known | {"attention_mask": torch.ones_like(ids)})[0]
        except TypeError as error:
            raise ConfigError(
                f"the positions of pictures: {error}",
                hint="give all that the processor returns for these tokens",
            ) from error
        return found

    def layer_devices_of_model(self) -> list[torch.device]:
        """Return the device of each layer of the decoder."""
        return [next(layer.parameters()).device for layer in self.module.layers]

    def block_masks(self, blocks: Tensor, cache: Any) -> Keywords:
        """Return masks by which new tokens of one block `[T]` int64, -1 for text, see each other;
        for large Gemmas.

        transformers makes them itself, but only where the blocks of all tokens since the first are
        given.
        """
        whole = torch.nn.functional.pad(blocks, (cache.get_seq_length(), 0), value=-1)[None]
        inputs = torch.empty(
            1, len(blocks), 0, dtype=next(self.module.parameters()).dtype, device=blocks.device
        )
        make = sys.modules[type(self.module).__module__].create_masks_for_vision_model
        return {"attention_mask": make(self.config, inputs, None, cache, None, whole)}

    def step_types(self, inputs: Mapping[str, Any], cache: Any) -> Keywords:
        """Return which tokens are of pictures, of all since the first: a model whose pictures see
        both ways asks it.
        """
        types = inputs.get("mm_token_type_ids")
        if types is None or getattr(self.config, "use_bidirectional_attention", None) != "vision":
            return {}
        return {"mm_token_type_ids": torch.nn.functional.pad(types, (cache.get_seq_length(), 0))}

    def to_halves(self, x: Tensor) -> Tensor:
        """Return `[..., D]` with the features of each rotated pair half a key apart, as memories
        expect them.
        """
        if self._layout is None:
            return x
        rest = torch.arange(len(self._layout), x.shape[-1])
        return x[..., torch.cat((self._layout, rest)).to(x.device)]

    def _find_layout(self, module: Any) -> Tensor | None:
        """Return the order that puts rotated pairs half a key apart, `[R]` int64; None: they are.

        Some models pair neighbours. The model's own rotation of a random key tells. ConfigError: it
        is neither.
        """
        apply = getattr(module, "apply_rotary_pos_emb", None)
        if apply is None or self._rotary is None:
            return None
        cos, sin = self.angles(torch.full((1, self.position_components), 3))
        straight = torch.arange(cos.shape[-1])
        # Last: an angle for each pair, where most models have one for each feature.
        for order in (straight, _pair(straight), straight.repeat(2)):
            key = torch.randn(1, 1, 1, len(order), generator=torch.Generator().manual_seed(0))
            keys = (key, key) if "k" in signature(apply).parameters else (key,)
            try:
                rotated = apply(*keys, cos=cos[None], sin=sin[None])
            except RuntimeError:  # the key is too wide, or too narrow
                continue
            theirs = (rotated[1] if isinstance(rotated, tuple) else rotated)[0, 0, 0]
            rows = torch.arange(len(order))
            for layout in (rows, _pair(rows)):
                ours = rotate(key[0, 0, 0, layout], (cos[0, order], sin[0, order]))
                if torch.allclose(ours, theirs[layout], atol=1e-5):
                    self._angle_order = None if order is straight else order
                    return None if layout is rows else layout
        raise ConfigError(
            f"{type(self._rotary).__name__} rotates keys in a way that no memory can undo"
        )


def _pair(rows: Tensor) -> Tensor:
    """Return every second row, and then the others."""
    return torch.cat((rows[::2], rows[1::2]))
