"""Two memories that choose what goes as `durable` does, and do something else with it.

`python -m samples.worlds harder --memory samples.studies.harder.ablation:DroppedConfig`
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from protokv.memories.durable.bank import MOST_PROTOTYPE_NUMBER
from protokv.memories.durable.memory import DurableMemory
from protokv.memories.durable.novelty import MergeExclusions
from protokv.memories.durable.rule import DurableRule, find_kept
from protokv.memories.durable.settings import DurableConfig


class _DroppedRule(DurableRule):
    def _choose(
        self, sketch: Tensor, mass: Tensor, kept: Tensor, T: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        into, stay, least = super()._choose(sketch, mass, kept, T)
        return self._line[: mass.shape[1]].repeat(len(into), 1), stay, least


class Dropped(DurableMemory):
    """Drops what goes: what stays is exact tokens, and counts itself alone."""

    rule = _DroppedRule


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedConfig(DurableConfig):
    """The settings of `Dropped`."""

    name: ClassVar[str] = "durable-dropped"


class _CountedRule(DurableRule):
    def _merge(
        self, centers: Tensor, sketch: Tensor, rows: Tensor, limits: MergeExclusions, C: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        mass = rows[..., 0]
        kept = find_kept(limits, rows[..., 1], mass)
        into, stay, cost = self._choose(sketch, mass, kept, rows.shape[1] - C)
        total = mass.scatter_reduce(1, into, mass, "sum", include_self=False)
        centers = centers.gather(1, stay[:, :, None].expand(-1, -1, centers.shape[2]))
        rows = rows.gather(1, stay[:, :, None].expand(-1, -1, rows.shape[2]))
        rows[..., 0] = total.gather(1, stay)
        return centers, rows.clamp_(max=MOST_PROTOTYPE_NUMBER).int(), cost


class Counted(DurableMemory):
    """Counts what goes in what it would have gone into, which stays as it is: an exact token."""

    rule = _CountedRule


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedConfig(DurableConfig):
    """The settings of `Counted`."""

    name: ClassVar[str] = "durable-counted"


DroppedConfig.memory = Dropped
CountedConfig.memory = Counted
