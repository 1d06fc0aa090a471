"""The forms that a state can have on disk, by the suffix of its path.

A form is a module with the functions of `Form`. Owns the registry and what all forms that are one file share; the
module of a form is imported when it is first asked for, because some need more than the others.
"""

from __future__ import annotations

import os
import re
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from protokv.errors import StateError
from protokv.snapshot.document import not_found, unreadable
from protokv.snapshot.schema import Header, State

StatePath = str | os.PathLike[str]


class Form(Protocol):
    """What the module of a form offers. A path may be a URL where the form takes one."""

    def save(self, state: State, path: StatePath) -> None:
        """Write a state; the path holds the old or the new one whole at any time. StateError if it cannot."""

    def load(self, path: StatePath, *, verify: bool = True) -> State:
        """Read a state, tensors on the CPU, every digest checked where `verify`."""

    def read_header(self, path: StatePath) -> Header:
        """Read and verify the header alone."""

    def check_target(self, path: StatePath) -> None:
        """StateError unless a state could be written there."""

    def stored_bytes(self, path: StatePath) -> int:
        """Bytes that the state takes where it is kept. StateNotFound if nothing is there."""


# A suffix comes before those that it ends in.
FORMS = {
    ".safetensors": "protokv.snapshot.safetensors_file",
    ".zarr.zip": "protokv.snapshot.zarr_zip",
    ".zarr": "protokv.snapshot.zarr_store",
    ".pt": "protokv.snapshot.torch_file",
}

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
        StateError: The suffix names no form, or the form cannot be at such a place.
    """
    suffix = suffix_of(path)
    if suffix is None:
        known = ", ".join(sorted(FORMS))
        raise StateError(f"expected a path that ends in one of {known}, got {path}", hint="Choose another name.")
    if is_url(path) and suffix != ".zarr":
        raise StateError(f"cannot keep a state as {suffix} at {path}", hint="Only .zarr can be in an object store.")
    return cast(Form, import_module(FORMS[suffix]))


def check_file_target(path: StatePath) -> None:
    """Whether a state of one file could be written to `path`.

    Raises:
        StateError: The folder is missing or may not be written to, or a folder is in the file's place.
    """
    target, folder = Path(path), Path(path).parent
    if not folder.is_dir():
        raise StateError(f"cannot write the state {target}: there is no folder {folder}", hint="Make it first.")
    if target.is_dir():
        raise StateError(f"cannot write the state {target}: it is a folder", hint="Choose another name.")
    if not os.access(folder, os.W_OK):
        raise StateError(f"cannot write the state {target}: {folder} is read-only", hint="Choose another folder.")


def file_bytes(path: StatePath) -> int:
    """Bytes of a state of one file.

    Raises:
        StateNotFound: Nothing is there.
    """
    try:
        return Path(path).stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        raise not_found(path) from None
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
