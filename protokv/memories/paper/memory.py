"""The paper's memory: `ProtoKV` under its settings."""

from protokv.core.prototypes import ProtoKV
from protokv.memories.paper import allocation as _allocation  # noqa: F401, adds a layout
from protokv.memories.paper.settings import ContinuityConfig as ContinuityConfig
from protokv.memories.paper.settings import PaperConfig as PaperConfig

PaperConfig.memory = ProtoKV
