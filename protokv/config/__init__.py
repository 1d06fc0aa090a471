"""Settings of memories: one frozen dataclass a kind, and `CONFIGS`, which finds it by the kind's name.

Adding a memory adds its dataclass here. Nothing in this package imports torch, so that the command line can check
settings before it loads anything.
"""

from __future__ import annotations

from protokv.config.base import MemoryConfig, parse_budget, parse_setting
from protokv.config.protokv import PRESETS, ProtoKVConfig
from protokv.config.retention import FullConfig, InfiniPotVConfig, LastFramesConfig, SlidingWindowConfig
from protokv.config.retrieval import DyCokeConfig, DyCokeDecodeConfig, ReKVConfig

__all__ = [
    "CONFIGS",
    "PRESETS",
    "DyCokeConfig",
    "DyCokeDecodeConfig",
    "FullConfig",
    "InfiniPotVConfig",
    "LastFramesConfig",
    "MemoryConfig",
    "ProtoKVConfig",
    "ReKVConfig",
    "SlidingWindowConfig",
    "parse_budget",
    "parse_setting",
]

CONFIGS: dict[str, type[MemoryConfig]] = {
    config.kind: config
    for config in (
        ProtoKVConfig,
        SlidingWindowConfig,
        InfiniPotVConfig,
        LastFramesConfig,
        FullConfig,
        ReKVConfig,
        DyCokeConfig,
        DyCokeDecodeConfig,
    )
}
