"""`PaperPrototypeMemory`: the paper's memory, and that of `continuity`. The rule and the settings
are in `rule`.

A pseudo-token is a centre and one of the likeliest residuals of its prototype (Algorithm 4).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from protokv.core.prototypes import PrototypeMemory
from protokv.core.rotary import Rotary
from protokv.core.tensors import MemoryShape, StateTensors, TensorSpec
from protokv.memories.paper.residuals import ResidualStats
from protokv.memories.paper.rule import ContinuityConfig, PaperConfig, PaperPrototypeRule

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
    def declare(cls, config: PaperConfig, shape: MemoryShape) -> tuple[TensorSpec, ...]:
        """Declare the tensors of every memory of this kind, and residual statistics."""
        K = config.prototypes
        residuals = ResidualStats.declare(config, shape, K) if config.residual and K else ()
        return (*super().declare(config, shape), *residuals)

    def parts(self) -> Sequence[StateTensors]:
        """Return the holders of these."""
        return super().parts() if self._residuals is None else (*super().parts(), self._residuals)

    def _pseudo_tokens(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = super()._pseudo_tokens(rows)
        assert values is not None
        if self._residuals is None:
            return keys, values
        key_modes, value_modes = self._residuals.modes(rows, self._config.pseudo_tokens)
        return keys + key_modes, values + value_modes

    def _compute_bias(self, mass: Tensor) -> Tensor:
        if self._config.mass_bias == "off":
            return (mass > 0).log()
        return mass.log() - (
            math.log(self._config.pseudo_tokens)
            if self._config.mass_bias == "log_n_over_s"
            else 0.0
        )

    def report(self) -> dict[str, Any]:
        """Return the report of every memory of this kind, and for each layer what its residual
        statistics hold.
        """
        found = super().report()
        if self._residuals is not None:
            layers = zip(found["layers"], self._residuals.report(), strict=True)
            found["layers"] = [bank | more for bank, more in layers]
        return found


PaperConfig.memory = PaperPrototypeMemory
