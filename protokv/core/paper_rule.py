"""`PaperRule`: continuity-aware assignment (Algorithm 1) and maintenance (Algorithm 2), a step at a time.

Source: ProtoKV (ICML 2026), arXiv 2606.26762, section 3. Joins `assignment`, `maintenance` and `merging`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from protokv.config import PaperConfig
from protokv.core.assignment import assign_
from protokv.core.bank import Assigned, BankListener, FarTokens, Policy, PrototypeBank
from protokv.core.maintenance import Recycler, decay_, decayed, merge_, recycle_
from protokv.core.memory import MemoryShape


class PaperRule(Policy):
    """The paper's rule; it has no state beside the bank.

    What the host must know of the bank to begin a step it asks once.
    """

    def __init__(self, bank: PrototypeBank, config: PaperConfig, shape: MemoryShape) -> None:
        self._bank, self._config, self._shape = bank, config, shape
        # Of one head at most: prototypes that have moved since close ones were looked for.
        self._moved = bank.mass.shape[2]
        # Whether a slot may be free that an evicted token does not open, and whether a prototype may die in this step.
        self._free = self._dying = True

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Any prototype may have moved: the bank is another."""
        self._moved = self._bank.mass.shape[2]

    def absorb_(self, tokens: FarTokens, listeners: Sequence[BankListener], step: int) -> Assigned:
        """Algorithm 1: open free slots, then assign each token to the prototype of least cost."""
        bank = self._bank
        free, dropped, self._dying = self._ask(tokens, step)
        if dropped:
            tokens = tokens.usable_only()
        T = tokens.keys.shape[1]
        self._free = free > T
        self._moved += 2 * T if free else T
        return assign_(bank, tokens, step, self._config, free=min(free, T))

    def _ask(self, tokens: FarTokens, step: int) -> tuple[int, bool, bool]:
        """Free slots of a head at most, whether tokens were dropped, whether a prototype may die in this step."""
        bank, config = self._bank, self._config
        free = (bank.mass == 0).sum(2).max()
        dropped = free.new_zeros(()) if tokens.usable is None else (~tokens.usable).any()
        dying = free.new_zeros(())
        if config.decay != "off":
            idle = step - bank.last_step > config.idle_steps
            dying = (idle & (bank.mass > 0) & (decayed(bank.mass, config) == 0)).any()
        known = torch.stack((free, dropped.long(), dying.long())).tolist()
        return known[0], bool(known[1]), bool(known[2])

    def maintain_(self, newest: Callable[[], FarTokens], listeners: Sequence[BankListener], step: int) -> None:
        """Algorithm 2: age, merge, recycle."""
        bank, config = self._bank, self._config
        if config.decay != "off":
            decay_(bank, listeners, step, config, dying=self._dying)
        if config.merge:
            self._moved = merge_(bank, listeners, config, self._moved)
            self._free |= self._moved > 0
        if config.recycle and (self._free or self._dying):
            recycler = Recycler(newest, config.seed, self._shape.of_model, self._shape.streams)
            self._moved += recycle_(bank, recycler, step)
