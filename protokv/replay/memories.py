"""Memories under test: named ones, their variants, and the label that each has in rows and
tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from protokv.errors import ConfigError
from protokv.memories import FullConfig, MemoryConfig
from protokv.texts import JsonObject

COMPARED_MEMORIES = (
    "full",
    "durable",
    "continuity",
    "paper",
    "sliding-window",
    "infinipot-v",
)
"""Memories that are compared on videos if none is named."""


@dataclass(frozen=True, slots=True)
class MemoryVariant:
    """A memory under test."""

    label: str  # its name in tables
    config: MemoryConfig
    blind: bool = False  # it sees no step; the model answers from the text alone

    @property
    def budget(self) -> int:
        """Visual tokens that a question may read."""
        return 0 if self.blind else self.config.budget

    def to_dict(self) -> JsonObject:
        """Return its settings as plain JSON values."""
        return {"kind": self.label} if self.blind else self.config.to_dict()


@dataclass(frozen=True, slots=True)
class SettingSweep:
    """A setting and the values to compare."""

    memory: str | None  # the memory whose setting changes; None: every memory
    setting: str
    values: Sequence[tuple[str, Any]]  # each value, after its text in tables


def make_memory_variants(names: Sequence[str], budgets: Sequence[int]) -> list[MemoryVariant]:
    """Return memories by their names, at each budget; see `drop_repeated_variants`. ConfigError: a
    name is unknown.
    """
    configs = [MemoryConfig.of(name, budget=budget) for budget in budgets for name in names]
    return drop_repeated_variants([MemoryVariant(config.name, config) for config in configs])


def drop_repeated_variants(variants: Sequence[MemoryVariant]) -> list[MemoryVariant]:
    """Keep each memory once per budget, and the full cache, which ignores its budget, once."""
    found: dict[tuple[str, int], MemoryVariant] = {}
    for variant in variants:
        budget = 0 if variant.config.name == FullConfig.name else variant.budget
        found.setdefault((variant.label, budget), variant)
    return list(found.values())


def vary_memory_settings(
    variants: Sequence[MemoryVariant], variations: Sequence[SettingSweep]
) -> list[MemoryVariant]:
    """Replace each memory by one variant per combination of values.

    ConfigError: a variation names a memory that is not compared, or an unknown setting or value.
    """
    found = list(variants)
    for variation in variations:
        names = {variant.config.name for variant in found}
        if variation.memory is not None and variation.memory not in names:
            raise ConfigError(
                f"{variation.memory}.{variation.setting} is set, and {variation.memory} is not "
                "compared",
                hint=f"memories: {', '.join(sorted(names))}",
            )
        found = [new for variant in found for new in _vary(variant, variation)]
    return found


def _vary(variant: MemoryVariant, variation: SettingSweep) -> list[MemoryVariant]:
    if variation.memory not in (None, variant.config.name):
        return [variant]
    return [
        MemoryVariant(
            f"{variant.label} {variation.setting}={text}",
            variant.config.with_fields({variation.setting: value}),
        )
        for text, value in variation.values
    ]
