"""Save a state, load it, look at its header, and ask whether it fits a model: whatever form its path has.

A path's form follows its suffix in the file system and its scheme elsewhere. The module of a form is imported when it
is first asked for, because some need more than the others.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from protokv.errors import StateError, StateMismatch
from protokv.records import BackboneIdentity
from protokv.snapshot.formats.base import Form, StatePath
from protokv.snapshot.schema import Header, State

# Where each class is.
FORMS = {
    ".safetensors": "protokv.snapshot.formats.safetensors:SafetensorsForm",
    ".zarr": "protokv.snapshot.formats.zarr:ZarrForm",
    ".pt": "protokv.snapshot.formats.pt:PtForm",
}
DEFAULT_SUFFIX = ".safetensors"
OBJECT_STORE = "protokv.snapshot.formats.icechunk:IcechunkForm"

_URL = re.compile(r"[a-z][a-z0-9+.-]+://")


def is_url(path: StatePath) -> bool:
    """Whether a path names a place that is not in the file system."""
    return isinstance(path, str) and _URL.match(path) is not None


def suffix_of(path: StatePath) -> str | None:
    """The suffix of a path by which its form is found; None where there is no such form."""
    name = os.fspath(path).rstrip("/")
    return next((suffix for suffix in FORMS if name.endswith(suffix)), None)


def form_of(path: StatePath) -> Form:
    """The form that a state at this path has.

    Raises:
        StateError: The suffix names no form, or what the form needs is not installed.
    """
    if is_url(path):
        return _made(OBJECT_STORE, path)
    suffix = suffix_of(path)
    if suffix is None:
        known = ", ".join(sorted(FORMS))
        raise StateError(f"expected a path that ends in one of {known}, got {path}", hint="Choose another name.")
    return _made(FORMS[suffix], path)


def form_to_read(path: StatePath) -> Form:
    """As `form_of`; what has another suffix is read as the default form, which says what it is if it is no state."""
    return form_of(path if is_url(path) or suffix_of(path) else DEFAULT_SUFFIX)


def _made(where: str, path: StatePath) -> Form:
    module, _, name = where.partition(":")
    try:
        made: Form = getattr(import_module(module), name)()
    except ImportError as error:
        raise StateError(
            f"{path} is in an object store, and {error.name or 'what it takes'} is not installed",
            hint="pip install 'protokv[object-store]'",
        ) from error
    return made


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
        StateLocked: Somebody else is writing it.
    """
    form_of(path).save(state, path)


def load(path: StatePath, *, verify: bool = True, at_s: float | None = None) -> State:
    """Read a state, tensors on the CPU.

    Args:
        path: where it is.
        verify: check the digests of the tensors.
        at_s: take the newest commit that is not after this stream time, of those that are kept.

    Raises:
        StateNotFound: Nothing is there, or all of it is after `at_s`.
        StateMismatch: The format is newer than this version reads.
        StateCorrupt: The state is damaged or hostile; the tensor or field is named where it can be.
        StateError: It cannot be read.
    """
    return form_to_read(path).load(path, verify=verify, at_s=at_s)


def read_header(path: StatePath) -> Header:
    """Read and verify the header alone. Raises as `load` does."""
    return form_to_read(path).read_header(path)


def stored_bytes(path: StatePath) -> int:
    """Bytes that the state takes where it is kept. Raises StateNotFound if nothing is there."""
    return form_to_read(path).stored_bytes(path)


def moments(path: StatePath) -> list[float]:
    """Stream times of the commits that `load` answers `at_s` from, ascending; the current one is the last.

    Raises as `load`.
    """
    return form_to_read(path).moments(path)


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
