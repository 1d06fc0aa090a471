"""Settings of memories: one frozen dataclass a memory, and `CONFIGS`, which finds it by the memory's name.

The name is the only one that a memory has: on the command line, in states, in tables and in JSON. Adding a memory adds
its dataclass here. Nothing in this package imports torch, so that settings can be checked before anything is loaded.
"""

from __future__ import annotations

from protokv.core.settings import MemoryConfig
from protokv.memories.durable.settings import DurableConfig
from protokv.memories.paper.settings import ContinuityConfig, PaperConfig, PrototypeConfig
from protokv.memories.settings import (
    DyCokeConfig,
    DyCokeDecodeConfig,
    FullConfig,
    HermesConfig,
    InfiniPotVConfig,
    LastFramesConfig,
    ReKVConfig,
    SlidingWindowConfig,
)

__all__ = [
    "CONFIGS",
    "DEFAULT",
    "ContinuityConfig",
    "DurableConfig",
    "DyCokeConfig",
    "DyCokeDecodeConfig",
    "FullConfig",
    "HermesConfig",
    "InfiniPotVConfig",
    "LastFramesConfig",
    "MemoryConfig",
    "PaperConfig",
    "PrototypeConfig",
    "ReKVConfig",
    "SlidingWindowConfig",
]

CONFIGS: dict[str, type[MemoryConfig]] = {
    config.name: config
    for config in (
        DurableConfig,
        PaperConfig,
        ContinuityConfig,
        InfiniPotVConfig,
        HermesConfig,
        ReKVConfig,
        DyCokeConfig,
        DyCokeDecodeConfig,
        LastFramesConfig,
        SlidingWindowConfig,
        FullConfig,
    )
}
"""The settings of each memory by its name; the defaults of the class are those of the name."""

DEFAULT = DurableConfig.name
"""The memory that is used where none is named."""
