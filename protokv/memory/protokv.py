"""`ProtoKV`: the paper's memory. Near window, prototype bank and residual statistics, shown as one context
(Alg. 4).

A step enters the near window; the tokens that leave it for this step are absorbed into the bank, their
residuals are counted, and the bank is maintained. The context has one shape for the life of a stream, `[sink
P0 | K * S | W]`, and its pseudo-tokens are a function of the state alone: only those of prototypes that
changed are decoded again. Keys enter the bank with their rotation removed, and are shown rotated to the
anchor of their prototype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from protokv.config import ProtoKVConfig
from protokv.context import Context
from protokv.errors import StateCorrupt
from protokv.memory.bank import PrototypeBank, Seen
from protokv.memory.base import Memory, MemoryShape, StepKV, require, size_of
from protokv.memory.continuity import FarTokens, absorb_
from protokv.memory.maintenance import Recycler, maintain_
from protokv.memory.near import NearWindow, Tokens
from protokv.memory.residual import Residuals
from protokv.memory.slots import Slots
from protokv.rotary import Rotary, rotate, unrotate


class ProtoKV(Memory):
    """Two tiers: W exact tokens, and K prototypes a layer and KV head that summarise all older ones."""

    kind: ClassVar[str] = "protokv"

    def __init__(self, config: ProtoKVConfig, shape: MemoryShape, rotary: Rotary) -> None:
        self._config, self._shape, self._rotary = config, shape, rotary
        K, S, W = config.prototypes, config.pseudo_tokens, config.near_tokens
        self._slots = Slots(shape, far=K * S, near=W)
        self._near = NearWindow(self._slots, shape.position_components)
        self._bank = PrototypeBank.empty(shape, K)
        self._residuals = Residuals(config, shape, K) if config.residual and K else None
        self._generator = torch.Generator().manual_seed(config.seed)

    def start(self, keys: Tensor, values: Tensor) -> None:
        """Take the prompt prefix."""
        self._slots.start(keys, values)

    def append(self, step: StepKV) -> None:
        """Take one step (Algorithm 1, a step at a time)."""
        self._slots.check(step, self._shape, self._near.last_step)
        leaving = self._near.append(step)
        if not len(leaving) or not self._config.prototypes:
            return
        followers = [] if self._residuals is None else [self._residuals]
        assigned = absorb_(self._bank, self._far_tokens(leaving), step.step, self._config)
        if self._residuals is not None:
            fitted = self._residuals.record_(assigned)
            self._bank.stale.flatten(0, 1)[fitted] = True
        recycler = Recycler(lambda: self._far_tokens(self._near.newest()), self._generator)
        maintain_(self._bank, followers, recycler, step.step, self._config)

    def _far_tokens(self, tokens: Tokens) -> FarTokens:
        cos, sin = self._rotary(tokens.positions)
        keys = unrotate(tokens.keys.float(), cos, sin)
        seen = Seen(tokens.coordinates, tokens.positions.float())
        return FarTokens(keys.flatten(0, 1), tokens.values.float().flatten(0, 1), seen)

    def context(self) -> Context:
        """All slots, the pseudo-tokens brought up to date."""
        K, S = self._config.prototypes, self._config.pseudo_tokens
        if K:
            rows = self._bank.stale.view(-1).nonzero().squeeze(1)
            if len(rows):
                self._show(rows)
                self._bank.stale.zero_()
            self._slots.bias[:, :, self._slots.far] = self._mass_bias().repeat_interleave(S, 2)
        return self._slots.context(self._near.positions, self._anchors)

    def _anchors(self) -> Tensor:
        """Stream positions of the pseudo-tokens, `[L, H, K * S, P]` int64: those that their keys are turned to."""
        return self._bank.position.round().long().repeat_interleave(self._config.pseudo_tokens, 2)

    def _show(self, rows: Tensor) -> None:
        """Write the pseudo-tokens of these prototypes into their slots."""
        H, K = self._bank.mass.shape[1:]
        S, D = self._config.pseudo_tokens, self._shape.head_size
        keys = self._bank.key_center.view(-1, 1, D)[rows]
        values = self._bank.value_center.view(-1, 1, D)[rows]
        if self._residuals is None:
            keys, values = keys.expand(-1, S, -1), values.expand(-1, S, -1)
        else:
            key_modes, value_modes = self._residuals.modes(rows)
            keys, values = keys + key_modes, values + value_modes
        anchors = self._bank.position.view(-1, self._shape.position_components)[rows]
        cos, sin = self._rotary(anchors.round().long())
        keys = rotate(keys, cos[:, None], sin[:, None])
        where = (rows // (H * K), rows // K % H, rows % K)
        for slots, shown in ((self._slots.keys, keys), (self._slots.values, values)):
            L, H = slots.shape[:2]
            slots[:, :, self._slots.far].view(L, H, K, S, D)[where] = shown.to(slots.dtype)

    def _mass_bias(self) -> Tensor:
        """The logit bias of each prototype, `[L, H, K]`; log 0 = -inf hides free slots."""
        mass = self._bank.mass
        if self._config.mass_bias == "off":
            return torch.zeros_like(mass).masked_fill_(mass == 0, -torch.inf)
        shared = math.log(self._config.pseudo_tokens) if self._config.mass_bias == "log_n_over_s" else 0.0
        return mass.log() - shared

    def tensors(self) -> dict[str, Tensor]:
        """The state: sink, near window, bank, residual statistics and the generator of recycling."""
        residual = {} if self._residuals is None else self._residuals.tensors()
        parts = self._slots.tensors() | self._near.tensors() | self._bank.tensors() | residual
        return parts | {"bank.generator": self._generator.get_state()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take a state that `tensors` gave."""
        expected = dict(self._slots.spec()) | dict(self._near.spec()) | dict(self._bank.spec())
        expected["bank.generator"] = (tuple(self._generator.get_state().shape), torch.uint8)
        if self._residuals is not None:
            fitted = tensors.get("codebook.fitted")
            expected |= self._residuals.spec(fitted=fitted is not None and bool(fitted.all()))
        require(tensors, expected)
        bank = self._bank.loaded(tensors)
        residuals = None if self._residuals is None else self._residuals.loaded(tensors, bank.mass > 0)
        generator = torch.Generator()
        try:
            generator.set_state(tensors["bank.generator"].cpu())
        except RuntimeError as error:
            raise StateCorrupt("state: tensor bank.generator is not the state of a generator") from error
        self._near.load(tensors)
        self._slots.load(tensors)
        self._bank, self._residuals, self._generator = bank, residuals, generator

    def nbytes(self) -> dict[str, int]:
        """Bytes by part; `context` is the pseudo-tokens, which are not part of a saved state."""
        slots = self._slots
        residual = {} if self._residuals is None else self._residuals.nbytes()
        far = (part[:, :, slots.far] for part in (slots.keys, slots.values, slots.bias))
        return {
            "sink": slots.sink_nbytes(),
            "near": self._near.nbytes(),
            "bank": self._bank.nbytes(),
            **residual,
            "context": size_of(*far),
        }

    def report(self) -> dict[str, Any]:
        """Tokens held exactly, and for each layer what its prototypes hold and what happened to them."""
        layers = self._bank.report(self._near.last_step)
        if self._residuals is not None:
            layers = [bank | more for bank, more in zip(layers, self._residuals.report(), strict=True)]
        return {"near_tokens_in_use": len(self._near), "layers": layers}
