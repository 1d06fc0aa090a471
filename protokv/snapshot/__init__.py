"""States on disk: a header of plain values and tensors by name, whole or absent, verified on loading.

The form follows the path: `.safetensors`, `.pt`, a `.zarr` hierarchy, or a repository in an object store. The names
below are imported when they are first used, so that the lock needs no torch. Knows nothing of models and memories.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from protokv.records import BackboneIdentity, StreamClock
    from protokv.snapshot.api import (
        DEFAULT_SUFFIX,
        FORMS,
        check_fits,
        check_target,
        is_url,
        load,
        moments,
        read_header,
        save,
        stored_bytes,
    )
    from protokv.snapshot.formats.base import StatePath
    from protokv.snapshot.schema import FORMAT_VERSION, Header, State

__all__ = [
    "DEFAULT_SUFFIX",
    "FORMAT_VERSION",
    "FORMS",
    "BackboneIdentity",
    "Header",
    "State",
    "StatePath",
    "StreamClock",
    "check_fits",
    "check_target",
    "is_url",
    "load",
    "moments",
    "read_header",
    "save",
    "stored_bytes",
]

_HOMES = {
    "FORMAT_VERSION": "protokv.snapshot.schema",
    "BackboneIdentity": "protokv.records",
    "Header": "protokv.snapshot.schema",
    "State": "protokv.snapshot.schema",
    "StatePath": "protokv.snapshot.formats.base",
    "StreamClock": "protokv.records",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "protokv.snapshot.api")), name)
