"""`PaperPrototypeRule`: continuity-aware assignment (`assignment`) and maintenance (`maintenance`)
of a prototype bank.

Source: ProtoKV (ICML 2026), arXiv 2606.26762, section 3 and appendix B. Residual statistics, if
there are any, are told which prototype took which token, what died and what was merged.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from protokv.core.bank import BankRule, FarTokens, PrototypeBank
from protokv.core.tensors import MemoryShape, Specs, TensorDict, TensorGroups, Tensors
from protokv.memories.paper.assignment import assign_tokens_
from protokv.memories.paper.bank import PaperBank, leave_out_uncounted
from protokv.memories.paper.maintenance import decay_masses_, merge_close_, recycle_
from protokv.memories.paper.residuals import ResidualStats
from protokv.memories.paper.settings import PaperConfig


class PaperPrototypeRule(BankRule[PaperConfig]):
    """The paper's rule over one bank, and the statistics that are kept of what centres average
    away.
    """

    @classmethod
    def declare(cls, config: PaperConfig, shape: MemoryShape) -> Specs:
        """Declare residual statistics, if there are any."""
        return ResidualStats.declare(config, shape, config.prototypes) if config.residual else ()

    def __init__(self, bank: PrototypeBank, config: PaperConfig, shape: MemoryShape) -> None:
        assert isinstance(bank, PaperBank)
        self._bank = bank
        self._config = config
        self._shape = shape
        # Prototypes `[L * H, K]` that moved since the last search for close ones. Not state: all
        # True is safe.
        self._moved = torch.ones_like(bank.mass, dtype=torch.bool).flatten(0, 1)
        self.residuals = (
            ResidualStats(config, shape, config.prototypes) if config.residual else None
        )

    def live_tensors(self) -> TensorDict:
        """Return the statistics."""
        return {} if self.residuals is None else self.residuals.live_tensors()

    def take(self, tensors: Tensors) -> None:
        """Take the statistics. Assume that every prototype of the loaded bank moved."""
        self._moved.fill_(True)
        if self.residuals is not None:
            self.residuals.take(tensors)

    def buffers(self) -> TensorGroups:
        """Return which prototypes moved."""
        return {"bank": (self._moved,)}

    def absorb_(
        self, tokens: FarTokens, step: int, numbers: Tensor, newest: Callable[[], FarTokens]
    ) -> tuple[Tensor, ...]:
        """Run Algorithm 1 for the evicted tokens of one step, and Algorithm 2: age, merge,
        recycle.
        """
        bank = self._bank
        config = self._config
        tokens = leave_out_uncounted(tokens)
        if tokens.keys.shape[1]:
            self._assign_(tokens, step)
        if config.decay != "off":
            decay_masses_(bank, self.residuals, step, config)
        if config.merge:
            merge_close_(bank, self._moved, self.residuals, config)
        if config.recycle:
            self._moved.view(-1)[recycle_(bank, newest, config.seed, step, self._shape)] = True
        return (bank.take_touched_(),)

    def _assign_(self, tokens: FarTokens, step: int) -> None:
        rows, residuals, prototypes = assign_tokens_(self._bank, tokens, step, self._config)
        self._moved.view(-1)[rows] = True
        if self.residuals is not None:
            K = self._moved.shape[1]
            fitted = self.residuals.record_(residuals, prototypes)
            self._bank.touch_(
                (fitted[:, None] * K + torch.arange(K, device=fitted.device)).view(-1)
            )
