"""Memories: what a stream is kept in. One file each, its settings beside its rule; `MEMORIES` finds
them by name.

A memory that is added here adds a line to `_MEMORIES`; one that lives elsewhere, an entry point of
the group `protokv.memories`. Nothing is imported before it is used, so that the command line knows
all names at no cost.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from protokv.core.settings import DEFAULT_MEMORY as DEFAULT_MEMORY
from protokv.core.settings import MEMORIES as MEMORIES
from protokv.core.settings import MemoryConfig as MemoryConfig

if TYPE_CHECKING:
    from protokv.core.prototypes import PrototypeConfig as PrototypeConfig
    from protokv.memories.compressed import HeldTokens as HeldTokens
    from protokv.memories.compressed import KVCompressionConfig as KVCompressionConfig
    from protokv.memories.compressed import ScoredMemory as ScoredMemory
    from protokv.memories.durable.settings import DurableConfig as DurableConfig
    from protokv.memories.dycoke import DyCokeConfig as DyCokeConfig
    from protokv.memories.full import FullConfig as FullConfig
    from protokv.memories.hermes import HermesConfig as HermesConfig
    from protokv.memories.infinipot_v import InfiniPotVConfig as InfiniPotVConfig
    from protokv.memories.last_frames import LastFramesConfig as LastFramesConfig
    from protokv.memories.paper.settings import ContinuityConfig as ContinuityConfig
    from protokv.memories.paper.settings import PaperConfig as PaperConfig
    from protokv.memories.rekv import ReKVConfig as ReKVConfig
    from protokv.memories.reservoir import FirstTokensConfig as FirstTokensConfig
    from protokv.memories.reservoir import RandomTokensConfig as RandomTokensConfig
    from protokv.memories.window import SlidingWindowConfig as SlidingWindowConfig

_MEMORIES = {
    "durable": ("durable.memory", "DurableConfig"),
    "paper": ("paper.memory", "PaperConfig"),
    "continuity": ("paper.memory", "ContinuityConfig"),
    "infinipot-v": ("infinipot_v", "InfiniPotVConfig"),
    "hermes": ("hermes", "HermesConfig"),
    "rekv": ("rekv", "ReKVConfig"),
    "dycoke": ("dycoke", "DyCokeConfig"),
    "last-frames": ("last_frames", "LastFramesConfig"),
    "first-tokens": ("reservoir", "FirstTokensConfig"),
    "random": ("reservoir", "RandomTokensConfig"),
    "sliding-window": ("window", "SlidingWindowConfig"),
    "full": ("full", "FullConfig"),
}
for _name, (_file, _class) in _MEMORIES.items():
    MEMORIES.add(_name, f"{__name__}.{_file}:{_class}")

_HOMES = {name: f"{__name__}.{file}" for file, name in _MEMORIES.values()} | {
    "HeldTokens": f"{__name__}.compressed",
    "KVCompressionConfig": f"{__name__}.compressed",
    "PrototypeConfig": "protokv.core.prototypes",
    "ScoredMemory": f"{__name__}.compressed",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
