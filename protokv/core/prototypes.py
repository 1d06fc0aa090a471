"""`ProtoKV`: the paper's memory. Near window, prototype bank and residual statistics, shown as one context (Algorithm
4).

A step enters the near window; the tokens that leave it for this step are absorbed into the bank, their residuals are
counted, and the bank is maintained. The context has one shape for the life of a stream, `[sink P0 | K * S | W]`. Its
pseudo-tokens are a function of the state alone: centre plus decoded residual, the key rotated to the anchor of its
prototype. Only those of prototypes that changed are written again. Keys enter the bank with their rotation removed.

`Layout` says which far slots belong to which prototype; `LAYOUTS` names the ways to deal them out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from protokv.core.arrays import write_rows_
from protokv.core.bank import FarTokens, Policy, PrototypeBank, TokenPositions
from protokv.core.context import Context
from protokv.core.memory import LocalMemory
from protokv.core.near import NearWindow, Slots, Tokens
from protokv.core.rotary import Rotary, rotate, unrotate
from protokv.core.sanitize import Sanitizer
from protokv.core.step import StepKV
from protokv.core.tensors import MemoryShape, StatePart, TensorSpec, size_of
from protokv.memories.paper.residuals import Residuals
from protokv.memories.paper.rule import PaperRule

if TYPE_CHECKING:
    from protokv.memories.paper.settings import PrototypeConfig

# Pseudo-tokens that are written at once: in float32 they take several times their bytes.
_TOKENS_AT_ONCE = 2**18


class Layout:
    """Which far slots show which prototype: S slots for each, in order. Flat over `B = L * H` heads.

    Attributes:
        counts: how many slots a prototype has, int64, S or `[B, K]`.
    """

    def __init__(self, slots: Slots, prototypes: int, pseudo_tokens: int) -> None:
        L, H, N, _ = slots.keys.shape
        far = torch.arange(slots.far.start, slots.far.stop, device=slots.keys.device)
        heads = N * torch.arange(L * H, device=far.device)
        self._slots = slots
        self.counts = torch.tensor(pseudo_tokens, device=far.device)
        # Of each prototype its slots among those of all heads, [B * K, S].
        self._places = (heads[:, None] + far).view(-1, pseudo_tokens)

    def deal_(self, rows: Tensor, bank: PrototypeBank, residuals: Residuals | None) -> Tensor:
        """Deal out the slots again after prototypes `rows` `[n]` changed; return the rows to write again."""
        return rows

    def places_of(self, rows: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Yield prototypes `rows` `[n]`, flat over `B * K`, in batches with the slots of each.

        Yields:
            rows `[m]`; places `[m, s]` among the slots of all heads; shown `[m, s]` bool, False beyond the slots of a
            prototype, None where all have s.
        """
        yield rows, self._places.index_select(0, rows), None

    def spread(self, held: Tensor, empty: float) -> Tensor:
        """Return for each far slot what its prototype has in `held` `[B, K, ...]`, and `empty` where it has none."""
        return held[:, :, None].expand(-1, -1, self._places.shape[1], *held.shape[2:]).flatten(1, 2)

    def nbytes(self) -> int:
        """Return its bytes."""
        return size_of(self.counts, self._places)


LAYOUTS: dict[str, type[Layout]] = {"fixed": Layout}
"""Layouts by the setting `allocation`; `protokv.memories.paper.allocation` adds one."""


class ProtoKV(LocalMemory):
    """Two tiers: W exact tokens, and K prototypes a layer and KV head that summarize all older ones.

    A subclass replaces the bank or the rule by overriding `bank_type` and `rule_type`.
    """

    def __init__(self, config: PrototypeConfig, shape: MemoryShape, rotary: Rotary) -> None:
        super().__init__(config, shape, rotary)
        K = config.prototypes
        rule = self.rule_type(config)
        self._slots = self.new_slots(config, shape)
        self._near = NearWindow(self._slots, shape.position_components)
        self._bank = self.bank_type(config)(shape, K, spread=rule.needs_spread)
        self._policy: Policy | None = rule(self._bank, config, shape) if K else None
        self._residuals = Residuals(config, shape, K) if config.residual and K else None
        self._layout = LAYOUTS[config.allocation](self._slots, K, config.pseudo_tokens)

    @staticmethod
    def bank_type(config: Any) -> type[PrototypeBank]:
        """Return the class of the bank under these settings."""
        return PrototypeBank

    @staticmethod
    def rule_type(config: Any) -> type[Policy]:
        """Return the rule by which tokens enter the bank."""
        return PaperRule

    def new_slots(self, config: Any, shape: MemoryShape) -> Slots:
        """Return the slots that attention reads, all free."""
        return Slots(shape, far=self.far_slots(config), near=config.near_tokens)

    @staticmethod
    def far_slots(config: Any) -> int:
        """Return how many slots hold pseudo-tokens that stay written."""
        return int(config.prototypes * config.pseudo_tokens)

    @classmethod
    def declare(cls, config: Any, shape: MemoryShape) -> tuple[TensorSpec, ...]:
        """Declare the prompt prefix, the near window, the bank, its rule's own and residual statistics."""
        K, rule = config.prototypes, cls.rule_type(config)
        return (
            *Slots.declare(shape),
            *Sanitizer.declare(),
            *NearWindow.declare(shape, config.near_tokens),
            *cls.bank_type(config).declare(shape, K, spread=rule.needs_spread),
            *(rule.declare(config, shape) if K else ()),
            *(Residuals.declare(config, shape, K) if config.residual and K else ()),
        )

    def parts(self) -> Sequence[StatePart]:
        """Return the holders of these."""
        optional = (self._policy, self._residuals)
        return self._slots, self._sanitizer, self._near, self._bank, *(part for part in optional if part is not None)

    def append(self, step: StepKV) -> None:
        """Take one step."""
        self._take_step(self._admit(step, self._near.last_step))

    def _take_step(self, step: StepKV) -> None:
        """Take one step that was admitted (Algorithm 1, a step at a time)."""
        if self._policy is not None:
            self._policy.see_(self._near.newest, step)
        leaving = self._near.append(step)
        if self._policy is None or not len(leaving):
            return
        listeners = [] if self._residuals is None else [self._residuals]
        assigned = self._policy.absorb_(self._far_tokens(leaving), listeners, step.step)
        if self._residuals is not None:
            K = self._config.prototypes
            fitted = self._residuals.record_(assigned)
            self._bank.touch_((fitted[:, None] * K + torch.arange(K, device=fitted.device)).view(-1))
        self._policy.maintain_(lambda: self._far_tokens(self._near.newest()).counted_only(), listeners, step.step)

    def _far_tokens(self, tokens: Tokens) -> FarTokens:
        keys = unrotate(tokens.keys, *self._rotary(tokens.positions)).flatten(0, 1)
        token_positions = TokenPositions(tokens.coordinates, tokens.positions.double())
        return FarTokens(keys, tokens.values.float().flatten(0, 1), token_positions, tokens.usable.long())

    def context(self) -> Context:
        """Return all slots, with the pseudo-tokens up to date."""
        self._show()
        return self._slots.context(self._near.positions, self._anchors)

    def _show(self) -> None:
        """Bring the pseudo-tokens up to date."""
        if self._config.prototypes:
            rows = self._bank.take_touched_()
            if self._residuals is not None:
                rows = torch.unique(rows)
            rows = self._layout.deal_(rows, self._bank, self._residuals)
            for some in torch.split(rows, max(1, _TOKENS_AT_ONCE // self._config.pseudo_tokens)):
                self._write_pseudo_tokens(some)
            self._write_biases()

    def _write_pseudo_tokens(self, rows: Tensor) -> None:
        """Write the keys and values of some prototypes into their slots."""
        bank, held = self._bank, self._slots
        for some, places, shown in self._layout.places_of(rows):
            keys, values = (center[:, None] for center in bank.centers(some))
            if self._residuals is not None:
                key_modes, value_modes = self._residuals.modes(some, places.shape[1])
                keys, values = keys + key_modes, values + value_modes
            cos, sin = self._rotary(bank.position.flatten(0, 2)[some].round().long())
            keys = rotate(keys, cos[:, None], sin[:, None])
            for part, new in ((held.keys, keys), (held.values, values)):
                new = new.to(part.dtype).expand(*places.shape, -1)
                if shown is None:
                    write_rows_(part.flatten(0, 2), places.view(-1), new.flatten(0, 1))
                else:
                    write_rows_(part.flatten(0, 2), places[shown], new[shown])

    def _write_biases(self) -> None:
        bias = self._bias_of(self._bank.mass.flatten(0, 1), self._layout.counts)
        far = self._slots.bias[:, :, self._slots.far]
        far.copy_(self._layout.spread(bias, -torch.inf).view(far.shape))

    def _bias_of(self, mass: Tensor, pseudo_tokens: Tensor) -> Tensor:
        """Return the logit bias of prototypes of `mass`, shown as `pseudo_tokens` each; log 0 = -inf hides free
        slots."""
        if self._config.mass_bias == "off":
            return (mass > 0).log()
        bias = mass.log()
        return bias - pseudo_tokens.clamp(min=1).log() if self._config.mass_bias == "log_n_over_s" else bias

    def _anchors(self) -> Tensor:
        """Return the stream positions that the pseudo-tokens are rotated to, `[L, H, K * S, P]` int64."""
        L, H, _, P = self._bank.position.shape
        return self._layout.spread(self._bank.position.flatten(0, 1).round().long(), 0).view(L, H, -1, P)

    def nbytes(self) -> dict[str, int]:
        """Return bytes by part; `context` is the pseudo-tokens, which are not part of a saved state."""
        slots = self._slots
        far = (part[:, :, slots.far] for part in (slots.keys, slots.values, slots.bias))
        return super().nbytes() | {"context": size_of(*far) + self._layout.nbytes()}

    def report(self) -> dict[str, Any]:
        """Return tokens held exactly, and for each layer what its prototypes hold and what happened to them."""
        layers = self._bank.report(self._near.last_step)
        if self._residuals is not None:
            layers = [bank | more for bank, more in zip(layers, self._residuals.report(), strict=True)]
        return {"near_tokens_in_use": len(self._near), "tokens_dropped": int(self._sanitizer.dropped), "layers": layers}
