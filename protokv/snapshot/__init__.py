"""States on disk: save, load, look at the header, and ask whether a state fits a model.

The form follows the suffix: one file (`.safetensors`, `.pt`, `.zarr.zip`), or a folder or object store that is written
by what changed (`.zarr`). A path holds the old or the new complete state, every byte is verified on loading, and a
damaged or hostile state ends in one StateError. Knows nothing of models and memories: a state is a header of plain
values and tensors by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from protokv.errors import StateMismatch
from protokv.records import BackboneIdentity, StreamClock
from protokv.snapshot.forms import FORMS, Form, StatePath, form_of, is_url, suffix_of
from protokv.snapshot.schema import FORMAT_VERSION, Header, State

__all__ = [
    "DEFAULT_SUFFIX",
    "FORMAT_VERSION",
    "FORMS",
    "BackboneIdentity",
    "Header",
    "State",
    "StreamClock",
    "check_fits",
    "check_target",
    "is_url",
    "load",
    "read_header",
    "save",
    "stored_bytes",
]

DEFAULT_SUFFIX = ".safetensors"


def check_target(path: StatePath) -> None:
    """Whether a state could be written to `path`: asked before hours of work, not after them.

    Raises:
        StateError: The suffix names no form, or the place is missing, may not be written to, or holds something else.
    """
    form_of(path).check_target(path)


def save(state: State, path: StatePath) -> None:
    """Write a state; the path holds the old or the new one whole at any time.

    Raises:
        StateError: The suffix names no form, or the state cannot be written; the old one is still there.
    """
    form = form_of(path)
    form.check_target(path)
    form.save(state, path)


def load(path: StatePath, *, verify: bool = True) -> State:
    """Read a state, tensors on the CPU. Without `verify` the digests of the tensors are not checked.

    Raises:
        StateNotFound: Nothing is there.
        StateMismatch: The format is newer than this version reads.
        StateCorrupt: The state is damaged or hostile; the tensor or field is named where it can be.
        StateError: It cannot be read.
    """
    return _form_to_read(path).load(path, verify=verify)


def read_header(path: StatePath) -> Header:
    """Read and verify the header alone. Raises as `load` does."""
    return _form_to_read(path).read_header(path)


def stored_bytes(path: StatePath) -> int:
    """Bytes that the state takes where it is kept. Raises StateNotFound if nothing is there."""
    return _form_to_read(path).stored_bytes(path)


def _form_to_read(path: StatePath) -> Form:
    """What has another suffix is read as the default form, which says what it is if it is no state."""
    if suffix_of(path) is None and not is_url(path):
        return form_of(DEFAULT_SUFFIX)
    return form_of(path)


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
