"""`ProtoKV`: the paper's memory. Near window, prototype bank and residual statistics, shown as one context
(Alg. 4).

A step enters the near window; the tokens that leave it for this step are absorbed into the bank, their
residuals are counted, and the bank is maintained. The context has one shape for the life of a stream, `[sink
P0 | K * S | W]`, and its pseudo-tokens are a function of the state alone: only those of prototypes that
changed are decoded again. Keys enter the bank with their rotation removed, and are shown rotated to the
anchor of their prototype.

Writes pseudo-tokens where attention reads them: centre plus residual, turned to its position, rounded once.

Knows nothing of which prototypes are shown and where.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from protokv.config import PrototypeConfig
from protokv.core.arrays import chunks, write_rows_
from protokv.core.bank import FarTokens, Policy, PrototypeBank, TokenPositions
from protokv.core.context import Context, SlotContext
from protokv.core.memory import LocalMemory, MemoryShape
from protokv.core.near import NearWindow, Slots, Tokens
from protokv.core.policies import find_policy
from protokv.core.residuals import Residuals
from protokv.core.rotary import Rotary, rotate, unrotate
from protokv.core.sanitize import Sanitizer
from protokv.core.step import StepKV
from protokv.core.tensors import StatePart, TensorSpec, size_of
from protokv.durable.quantized import QuantizedBank
from protokv.extras.allocation import Layout, by_variance
from protokv.extras.decoded import DecodedContext

# How many prototypes are made visible together where all are: in float32 they take several times their bytes.
ROWS_AT_ONCE = 2**18
# Numbers of coded keys, or values, of all layers that are decoded together: 16 MB of each in bfloat16.
_DECODED_AT_ONCE = 2**23


class ProtoKV(LocalMemory):
    """Two tiers: W exact tokens, and K prototypes a layer and KV head that summarise all older ones."""

    def __init__(self, config: PrototypeConfig, shape: MemoryShape, rotary: Rotary) -> None:
        super().__init__(config, shape, rotary)
        K, S, W = config.prototypes, config.pseudo_tokens, config.near_tokens
        # Coded prototypes have no slots: they are decoded where they are read.
        self._slots = Slots(shape, far=0 if config.is_quantized else K * S, near=W)
        self._near = NearWindow(self._slots, shape.position_components)
        rule = find_policy(config)
        self._bank = _bank_of(config)(shape, K, spread=rule.needs_spread)
        self._policy: Policy | None = rule(self._bank, config, shape) if K else None
        self._residuals = Residuals(config, shape, K) if config.residual and K else None
        self._layout = Layout.fixed(shape.layers * shape.kv_heads, 0 if config.is_quantized else K, S, shape.device)
        self._places = self._far_rows()
        # Whether masses change where nothing else does.
        self._ages = getattr(config, "decay", "off") != "off"

    @classmethod
    def declare(cls, config: Any, shape: MemoryShape) -> tuple[TensorSpec, ...]:
        """The prompt prefix, the near window, the bank, its rule's own and residual statistics."""
        K = config.prototypes
        return (
            *Slots.declare(shape),
            *Sanitizer.declare(),
            *NearWindow.declare(shape, config.near_tokens),
            *_bank_of(config).declare(shape, K, spread=find_policy(config).needs_spread),
            *(find_policy(config).declare(config, shape) if K else ()),
            *(Residuals.declare(config, shape, K) if config.residual and K else ()),
        )

    def parts(self) -> Sequence[StatePart]:
        """Who holds these."""
        optional = (self._policy, self._residuals)
        return self._slots, self._sanitizer, self._near, self._bank, *(part for part in optional if part is not None)

    def append(self, step: StepKV) -> None:
        """Take one step (Algorithm 1, a step at a time)."""
        step = self._admit(step, self._near.last_step)
        leaving = self._near.append(step)
        if self._policy is None or not len(leaving):
            return
        listeners = [] if self._residuals is None else [self._residuals]
        assigned = self._policy.absorb_(self._far_tokens(leaving), listeners, step.step)
        if self._residuals is not None:
            fitted = self._residuals.record_(assigned)
            self._bank.stale.flatten(0, 1).logical_or_(fitted[:, None])
        self._policy.maintain_(lambda: self._far_tokens(self._near.newest()).usable_only(), listeners, step.step)

    def _far_tokens(self, tokens: Tokens) -> FarTokens:
        cos, sin = self._rotary(tokens.positions)
        keys = unrotate(tokens.keys, cos, sin)
        seen = TokenPositions(tokens.coordinates, tokens.positions.double())
        return FarTokens(keys.flatten(0, 1), tokens.values.float().flatten(0, 1), seen, tokens.usable)

    def context(self) -> Context:
        """All slots, the pseudo-tokens brought up to date."""
        if self._config.is_quantized:
            return self._decoded_context()
        if self._config.prototypes:
            if self._residuals is not None and self._config.allocation == "variance":
                self._allocate(self._residuals)
            if self._residuals is None:
                for rows in torch.split(self._bank.collect_touched_(), ROWS_AT_ONCE):
                    self._show_centres(rows)
                if self._ages:
                    self._show_biases()
            else:
                self._show_stale(self._residuals)
        return self._slots.context(self._near.positions, self._anchors)

    def _decoded_context(self) -> Context:
        """All slots, those of prototypes decoded: at once where they are few, else when a layer is read."""
        slots, bank = self._slots, self._bank
        assert isinstance(bank, QuantizedBank)
        far = slice(slots.sink.stop, slots.sink.stop + bank.mass.shape[2])
        exact = slots.context(self._near.positions)
        bias = _between(slots.bias, far.start, self._bias_of(bank.mass, 1))

        def positions() -> Tensor:
            assert exact.positions is not None
            return _between(exact.positions(), far.start, self._anchors())

        def decode(layer: int | slice, heads: slice) -> tuple[Tensor, Tensor]:
            return bank.show(layer, heads, self._rotary, slots.keys.dtype)

        if bank.mass.numel() * self._shape.head_size <= _DECODED_AT_ONCE:
            pairs = zip((slots.keys, slots.values), decode(slice(None), slice(None)), strict=True)
            keys, values = (_between(held, far.start, shown) for held, shown in pairs)
            return SlotContext(keys, values, bias, far, positions)
        return DecodedContext(slots.keys, slots.values, bias, far, positions, decode=decode)

    def _allocate(self, residuals: Residuals) -> None:
        """Deal out the slots of the heads that changed; where prototypes get other slots, all are shown anew."""
        stale, mass = self._bank.stale.flatten(0, 1), self._bank.mass.flatten(0, 1)
        heads = stale.any(1).nonzero().squeeze(1)
        counts = by_variance(residuals.variances(heads), mass[heads] > 0, self._layout.owner.shape[1])
        changed = (counts != self._layout.counts[heads]).any(1)
        heads, counts = heads[changed], counts[changed]
        self._layout.deal_(heads, counts)
        stale[heads] = True
        # Slots that are nobody's must not tell of what stood there: a context is a function of the state.
        nobody = (self._layout.owner[heads] == mass.shape[1]).nonzero(as_tuple=True)
        for slots in (self._slots.keys, self._slots.values):
            slots[:, :, self._slots.far].flatten(0, 1)[heads[nobody[0]], nobody[1]] = 0.0

    def _anchors(self) -> Tensor:
        """Stream positions of the pseudo-tokens, `[L, H, K * S, P]` int64: those that their keys are turned to."""
        L, H, K, P = self._bank.position.shape
        if self._config.is_quantized:
            return self._bank.position.round().long()
        owner = self._layout.owner.clamp(max=max(K - 1, 0))[..., None].expand(-1, -1, P)
        return self._bank.position.round().long().view(L * H, K, P).gather(1, owner).view(L, H, -1, P)

    def _far_rows(self) -> Tensor:
        """Where the S slots of each prototype are among the slots of all heads, `[L * H * K, S]` int64."""
        L, H, N, _ = self._slots.keys.shape
        head = N * torch.arange(L * H, device=self._shape.device)[:, None]
        far = torch.arange(self._slots.far.start, self._slots.far.stop, device=self._shape.device)
        return (head + far).view(-1, self._config.pseudo_tokens)

    def _show_centres(self, rows: Tensor) -> None:
        """Write prototypes without residuals into their slots: S times their centre. Asks the device for nothing."""
        bank, slots, S = self._bank, self._slots, self._config.pseudo_tokens
        position, key, value, mass = (
            part.flatten(0, 2).index_select(0, rows)
            for part in (bank.position, bank.key_center, bank.value_center, bank.mass)
        )
        cos, sin = self._rotary(position.round().long())
        places = self._places.index_select(0, rows).view(-1)
        for part, shown in (
            (slots.keys, rotate(key, cos, sin)),
            (slots.values, value),
            (slots.bias, self._bias_of(mass, S)),
        ):
            copies = shown.to(part.dtype)[:, None].expand(-1, S, *shown.shape[1:]).flatten(0, 1)
            write_rows_(part.flatten(0, 2), places, copies)

    def _show_stale(self, residuals: Residuals) -> None:
        """Write the pseudo-tokens of the prototypes that changed, and all biases."""
        if len(rows := self._bank.stale.view(-1).nonzero().squeeze(1)):
            self._show(rows, residuals)
            self._bank.stale.zero_()
        self._show_biases()

    def _show_biases(self) -> None:
        mass = self._bank.mass.flatten(0, 1)
        # One more prototype, which hides the slots that are nobody's.
        bias = torch.nn.functional.pad(self._bias_of(mass, self._layout.counts), (0, 1), value=-torch.inf)
        far = self._slots.bias[:, :, self._slots.far]
        far.copy_(bias.gather(1, self._layout.owner).view(far.shape))

    def _show(self, rows: Tensor, residuals: Residuals) -> None:
        """Write the pseudo-tokens of these prototypes into their slots."""
        bank, held = self._bank, self._slots
        for which, slots, shown in self._layout.slots_of(rows, equal=self._config.allocation == "fixed"):
            some = rows[which]
            words, modes = residuals.modes(some, slots.shape[1])
            position, key, value = (
                part.flatten(0, 2).index_select(0, some) for part in (bank.position, bank.key_center, bank.value_center)
            )
            places = (some // bank.mass.shape[2])[:, None] * held.keys.shape[2] + held.far.start + slots
            turn = self._rotary(position.round().long())
            write_pseudo_tokens_(held.keys.flatten(0, 2), places, shown, key, words, modes[0], turn)
            write_pseudo_tokens_(held.values.flatten(0, 2), places, shown, value, words, modes[1])

    def _bias_of(self, mass: Tensor, pseudo_tokens: Tensor | int) -> Tensor:
        """The logit bias of prototypes of `mass` with so many pseudo-tokens each; log 0 = -inf hides free slots."""
        if self._config.mass_bias == "off":
            return (mass > 0).log()
        bias = mass.log()
        if self._config.mass_bias == "log_n_over_s":
            bias = bias - torch.as_tensor(pseudo_tokens).clamp(min=1).log()
        return bias

    def nbytes(self) -> dict[str, int]:
        """Bytes by part; `context` is the pseudo-tokens, which are not part of a saved state."""
        slots = self._slots
        far = (part[:, :, slots.far] for part in (slots.keys, slots.values, slots.bias))
        layout = self._layout
        return super().nbytes() | {"context": size_of(*far, layout.counts, layout.start, layout.owner, self._places)}

    def report(self) -> dict[str, Any]:
        """Tokens held exactly, and for each layer what its prototypes hold and what happened to them."""
        layers = self._bank.report(self._near.last_step)
        if self._residuals is not None:
            layers = [bank | more for bank, more in zip(layers, self._residuals.report(), strict=True)]
        return {"near_tokens_in_use": len(self._near), "tokens_dropped": int(self._sanitizer.dropped), "layers": layers}


def _bank_of(config: PrototypeConfig) -> type[PrototypeBank]:
    """The bank that the settings ask for."""
    return QuantizedBank if config.is_quantized else PrototypeBank


def _between(held: Tensor, at: int, more: Tensor) -> Tensor:
    """`held` with `more` put in at this slot, `[L, H, N, ...]`."""
    return torch.cat((held[:, :, :at], more, held[:, :, at:]), 2)


# Numbers of pseudo-tokens, keys or values, that stay in the cache of a CPU until they are written.
_CACHED_ELEMENTS = 2**17


def write_pseudo_tokens_(
    slots: Tensor,
    places: Tensor,
    shown: Tensor | None,
    center: Tensor,
    words: Tensor,
    modes: Tensor,
    turn: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Write keys, or values, of n prototypes with up to S pseudo-tokens each.

    Args:
        slots: `[N, D]` of any float dtype.
        places: `[n, S]` int64, rows of `slots`.
        shown: `[n, S]` bool, which of these are written, the first ones of each; None: all.
        center: `[n, D]` float32.
        words: `[w, D / G]` float32, codewords.
        modes: `[n, S, G]` int64, those that are added to the centre.
        turn: cos and sin `[n, D]` float32 of the prototypes' positions; None: not turned.
    """
    (n, S), D = places.shape, center.shape[1]
    for part in chunks(n, _CACHED_ELEMENTS // (S * D), slots.device):
        new = words.index_select(0, modes[part].reshape(-1)).view(-1, S, D).add_(center[part, None])
        if turn is not None:
            new = rotate(new, *(angle[part, None] for angle in turn))
        new, there = new.to(slots.dtype), places[part]
        if shown is None:
            write_rows_(slots, there.reshape(-1), new.flatten(0, 1))
        else:
            write_rows_(slots, there[shown[part]], new[shown[part]])
