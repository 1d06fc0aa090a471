"""`PaperRule`: continuity-aware assignment (Algorithm 1) and maintenance (Algorithm 2), a step at a time.

Source: ProtoKV (ICML 2026), arXiv 2606.26762, section 3. Joins `assignment` and `maintenance`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from protokv.config import PaperConfig
from protokv.memory.base import MemoryShape
from protokv.memory.protokv.bank import PrototypeBank
from protokv.memory.protokv.policies.assignment import assign_
from protokv.memory.protokv.policies.maintenance import Recycler, maintain_
from protokv.memory.protokv.policy import Assigned, FarTokens, Follower, Policy


class PaperRule(Policy):
    """The paper's rule; it has no state beside the bank."""

    def __init__(self, bank: PrototypeBank, config: PaperConfig, shape: MemoryShape) -> None:
        self._bank, self._config, self._shape = bank, config, shape

    def absorb_(self, tokens: FarTokens, followers: Sequence[Follower], step: int) -> Assigned:
        """Algorithm 1: open free slots, then assign each token to the prototype of least cost."""
        return assign_(self._bank, tokens, step, self._config)

    def maintain_(self, newest: Callable[[], FarTokens], followers: Sequence[Follower], step: int) -> None:
        """Algorithm 2: age, merge, recycle."""
        recycler = Recycler(newest, self._config.seed, self._shape.of_model, self._shape.streams)
        maintain_(self._bank, followers, recycler, step, self._config)
