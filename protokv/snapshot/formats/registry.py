"""Which form a path has: by its suffix in the file system, by its scheme elsewhere.

The module of a form is imported when it is first asked for, because some need more than the others.
"""

from __future__ import annotations

import os
import re
from importlib import import_module

from protokv.errors import StateError
from protokv.snapshot.formats.base import Form, StatePath

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
