"""States on disk and in object stores: a header and named tensors, whole or absent, verified on loading.

The path chooses the form: `.safetensors`, `.pt`, a `.zarr` folder, or a repository in an object store. The names of
`protokv.storage.api` are importable from here; they are loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from protokv.storage.api import *  # noqa: F403


def __getattr__(name: str) -> Any:
    return getattr(import_module("protokv.storage.api"), name)
