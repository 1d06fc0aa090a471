"""`PaperPrototypeMemory`: the paper's memory, and that of `continuity`. The rule is
in `rule`, the settings are in `settings`.

A pseudo-token is a centre and one of the likeliest residuals of its prototype (Algorithm 4).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from protokv.core.bank import PrototypeBank
from protokv.core.prototypes import PrototypeMemory
from protokv.core.rotary import rotate
from protokv.memories.paper.bank import PaperBank
from protokv.memories.paper.rule import PaperPrototypeRule
from protokv.memories.paper.settings import ContinuityConfig, PaperConfig
from protokv.texts import JsonObject

__all__ = ["ContinuityConfig", "PaperConfig"]


class PaperPrototypeMemory(PrototypeMemory[PaperConfig]):
    """The paper's two tiers."""

    rule = PaperPrototypeRule

    _rule: PaperPrototypeRule | None

    @classmethod
    def bank_type(cls, config: PaperConfig) -> type[PrototypeBank]:
        """Return the class of the bank."""
        return PaperBank

    def _write_rows(self, rows: Tensor, centers: Sequence[Tensor]) -> None:
        """Write the S pseudo-tokens of prototypes `rows` `[n]`."""
        S = self._config.pseudo_tokens
        shown = torch.stack(tuple(centers))[:, :, None].expand(-1, -1, S, -1)
        if self._rule is not None and self._rule.residuals is not None:
            shown = shown + self._rule.residuals.modes(rows, S)
        keys, values = shown
        cos, sin = self._rotary(self._bank.position.flatten(0, 2)[rows].round().long())
        keys = rotate(keys, (cos[:, None], sin[:, None]))
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
        if self._rule is not None and self._rule.residuals is not None:
            layers = zip(found["layers"], self._rule.residuals.report(), strict=True)
            found["layers"] = [bank | more for bank, more in layers]
        return found


PaperConfig.memory = PaperPrototypeMemory
