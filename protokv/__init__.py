"""ProtoKV: a vision-language model watches a video of any length in constant memory and answers
later.

The names below are what a user of the library needs; they are imported when they are first used, so
that `import protokv` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from protokv import errors
from protokv.version import __version__

if TYPE_CHECKING:
    from protokv.backbones import load_backbone
    from protokv.core.decoding import Decoding
    from protokv.ingestion import Every, ingest, ingest_events
    from protokv.memories import DurableConfig, MemoryConfig, PaperConfig
    from protokv.stream.answer import Answer
    from protokv.stream.cache import Cache
    from protokv.stream.opening import load, save
    from protokv.stream.session import Session
    from protokv.stream.watching import watching
    from protokv.video import open_source, read_steps


__all__ = [
    "Answer",
    "Cache",
    "Decoding",
    "DurableConfig",
    "Every",
    "MemoryConfig",
    "PaperConfig",
    "Session",
    "__version__",
    "errors",
    "ingest",
    "ingest_events",
    "load",
    "load_backbone",
    "open_source",
    "read_steps",
    "save",
    "watching",
]

_HOMES = {
    "Answer": "protokv.stream.answer",
    "Cache": "protokv.stream.cache",
    "Decoding": "protokv.core.decoding",
    "DurableConfig": "protokv.memories",
    "Every": "protokv.ingestion",
    "MemoryConfig": "protokv.memories",
    "PaperConfig": "protokv.memories",
    "Session": "protokv.stream.session",
    "ingest": "protokv.ingestion",
    "ingest_events": "protokv.ingestion",
    "load": "protokv.stream.opening",
    "load_backbone": "protokv.backbones",
    "open_source": "protokv.video",
    "read_steps": "protokv.video",
    "save": "protokv.stream.opening",
    "watching": "protokv.stream.watching",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
