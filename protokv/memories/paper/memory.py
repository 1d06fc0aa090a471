"""`PaperPrototypeMemory`: the paper's memory, and that of `continuity`. The rule is
in `rule`, the settings are in `settings`.

A pseudo-token is a centre and one of the likeliest residuals of its prototype (Algorithm 4).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from protokv.core.bank import BankRule, PrototypeBank
from protokv.core.near import ExactTokens
from protokv.core.prototypes import PrototypeMemory
from protokv.core.rotary import Rotary, rotate
from protokv.core.tensors import MemoryShape, Specs, StateTensors
from protokv.memories.paper.bank import PaperBank
from protokv.memories.paper.residuals import ResidualStats
from protokv.memories.paper.rule import PaperPrototypeRule
from protokv.memories.paper.settings import ContinuityConfig, PaperConfig
from protokv.texts import JsonObject

__all__ = ["ContinuityConfig", "PaperConfig"]


class PaperPrototypeMemory(PrototypeMemory[PaperConfig]):
    """The paper's two tiers."""

    rule = PaperPrototypeRule

    def __init__(self, config: PaperConfig, shape: MemoryShape, rotary: Rotary) -> None:
        super().__init__(config, shape, rotary)
        self._residuals: ResidualStats | None = None
        if isinstance(self._rule, PaperPrototypeRule) and config.residual:
            self._residuals = self._rule.residuals = ResidualStats(config, shape, config.prototypes)

    @classmethod
    def declare(cls, config: PaperConfig, shape: MemoryShape) -> Specs:
        """Declare the tensors of every memory of this kind, and residual statistics."""
        K = config.prototypes
        residuals = ResidualStats.declare(config, shape, K) if config.residual and K else ()
        return (*super().declare(config, shape), *residuals)

    def parts(self) -> Sequence[StateTensors]:
        """Return the holders of these."""
        return super().parts() if self._residuals is None else (*super().parts(), self._residuals)

    @classmethod
    def bank_type(cls, config: PaperConfig) -> type[PrototypeBank]:
        """Return the class of the bank."""
        return PaperBank

    def _absorb(
        self, rule: BankRule, leaving: ExactTokens, step: int, numbers: Tensor
    ) -> tuple[Tensor, ...]:
        """Run Algorithms 1 and 2."""
        assert isinstance(rule, PaperPrototypeRule)
        (changed,) = super()._absorb(rule, leaving, step, numbers)
        kept = rule.maintain_(lambda: self._far_tokens(self._near.newest()), step)
        return (torch.cat((changed, kept)),)

    def _write_rows(self, rows: Tensor, centers: Sequence[Tensor]) -> None:
        """Write the S pseudo-tokens of prototypes `rows` `[n]`."""
        S = self._config.pseudo_tokens
        keys, values = (center[:, None].expand(-1, S, -1) for center in centers)
        if self._residuals is not None:
            key_modes, value_modes = self._residuals.modes(rows, S)
            keys = keys + key_modes
            values = values + value_modes
        cos, sin = self._rotary(self._bank.position.flatten(0, 2)[rows].round().long())
        keys = rotate(keys, cos[:, None], sin[:, None])
        slots = rows[:, None] * S + torch.arange(S, device=rows.device)
        each = [keys.flatten(0, 1), values.flatten(0, 1)]
        self._slots.write_far(slots.view(-1), self._config.prototypes * S, each)

    def _compute_bias(self, mass: Tensor) -> Tensor:
        S = self._config.pseudo_tokens
        shared = math.log(S) if self._config.mass_bias == "log_n_over_s" else 0.0
        bias = (mass > 0).log() if self._config.mass_bias == "off" else mass.log() - shared
        return bias.repeat_interleave(S, 2)

    def _anchors(self) -> Tensor:
        return super()._anchors().repeat_interleave(self._config.pseudo_tokens, 2)

    def report(self) -> JsonObject:
        """Return the report of every memory of this kind, and for each layer what its residual
        statistics hold.
        """
        found = super().report()
        if self._residuals is not None:
            layers = zip(found["layers"], self._residuals.report(), strict=True)
            found["layers"] = [bank | more for bank, more in layers]
        return found


PaperConfig.memory = PaperPrototypeMemory
