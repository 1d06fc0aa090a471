"""Memories: bounded state that a stream is written into and that attention reads.

`MEMORIES` names them; `build_memory` makes the one a config asks for. Adding one is a file with a `Memory`
and a line here. Nothing in this package knows of transformers, files or sessions.
"""

from __future__ import annotations

from protokv.config import MemoryConfig
from protokv.memory.base import Memory, MemoryShape, StepKV
from protokv.memory.full import FullCache
from protokv.memory.protokv import ProtoKV
from protokv.memory.sliding_window import SlidingWindow
from protokv.rotary import Rotary

__all__ = ["MEMORIES", "Memory", "MemoryShape", "StepKV", "build_memory"]

MEMORIES: dict[str, type[Memory]] = {memory.kind: memory for memory in (ProtoKV, SlidingWindow, FullCache)}


def build_memory(config: MemoryConfig, shape: MemoryShape, rotary: Rotary) -> Memory:
    """An empty memory of the kind that the config names.

    Raises:
        ConfigError: the config does not fit the model.
    """
    return MEMORIES[config.kind](config, shape, rotary)
