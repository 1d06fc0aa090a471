"""States on disk: save, load, look at the header, and ask whether a state fits a model.

The form follows the suffix; `.safetensors` is the one there is. A path holds the old or the new complete state,
every byte is verified on loading, and a damaged or hostile file ends in one StateError. Knows nothing of models
and memories: a state is a header of plain values and tensors by name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from protokv.errors import StateError, StateMismatch
from protokv.records import BackboneIdentity, StreamClock
from protokv.snapshot import safetensors_file
from protokv.snapshot.safetensors_file import load, read_header
from protokv.snapshot.schema import FORMAT_VERSION, Header, State

__all__ = [
    "FORMAT_VERSION",
    "BackboneIdentity",
    "Header",
    "State",
    "StreamClock",
    "check_fits",
    "check_target",
    "load",
    "read_header",
    "save",
]


SUFFIX = ".safetensors"


def check_target(path: str | os.PathLike[str]) -> None:
    """Whether a state could be written to `path`: asked before hours of work, not after them.

    Raises:
        StateError: The suffix names no form, the folder is missing or may not be written to, or a folder is there.
    """
    target, folder = Path(path), Path(path).parent
    if target.suffix != SUFFIX:
        raise StateError(f"expected a path that ends in {SUFFIX}, got {target}", hint="Choose another name.")
    if not folder.is_dir():
        raise StateError(f"cannot write the state {target}: there is no folder {folder}", hint="Make it first.")
    if target.is_dir():
        raise StateError(f"cannot write the state {target}: it is a folder", hint="Choose another name.")
    if not os.access(folder, os.W_OK):
        raise StateError(f"cannot write the state {target}: {folder} is read-only", hint="Choose another folder.")


def save(state: State, path: str | os.PathLike[str]) -> None:
    """Write a state; the path holds the old or the new one whole at any time.

    Raises:
        StateError: The suffix names no form, or the file cannot be written; the old state is still there.
    """
    check_target(path)
    safetensors_file.save(state, path)


def check_fits(header: Header, identity: BackboneIdentity, memory_config: Mapping[str, Any] | None = None) -> None:
    """Check that a state was made by this model, and with this memory configuration where one is given.

    Where the model was loaded from is not compared: a folder may move.

    Raises:
        StateMismatch: The first field that differs, with both values.
    """
    for name in ("family", "config_hash", "dtype", "weights_digest"):
        _compare(f"backbone.{name}", getattr(header.backbone, name), getattr(identity, name), header)
    for name in sorted({*header.memory, *memory_config}) if memory_config is not None else ():
        missing = "nothing"
        ours = (memory_config or {}).get(name, missing)
        _compare(f"memory.{name}", header.memory.get(name, missing), ours, header)


def _compare(field: str, saved: object, ours: object, header: Header) -> None:
    if saved != ours:
        raise StateMismatch(
            f"the state does not fit: its {field} is {saved!r}, here it is {ours!r}",
            hint=f"the state was made with the model {header.backbone.name}; load that one, or make a new state",
        )
