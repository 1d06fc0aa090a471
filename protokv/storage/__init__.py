"""States on disk: a header of plain values and tensors by name, whole or absent, verified on loading.

The form follows the path: `.safetensors`, `.pt`, a `.zarr` hierarchy, or a repository in an object store. The names of
`protokv.storage.api` are found here, and imported when one is first used, so that the lock needs no torch. Knows
nothing of models and memories.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from protokv.storage.api import *  # noqa: F403


def __getattr__(name: str) -> Any:
    return getattr(import_module("protokv.storage.api"), name)
