"""The form of a path: the suffix chooses it, and `s3://`, `gs://` and `az://` put the one file into an object store.

A form that lives elsewhere registers its `Form` under its suffix, as an entry point of the group `protokv.forms`.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from pathlib import PurePath

from protokv.errors import SourceError, StateError, UnknownForm, did_you_mean
from protokv.state.form import KEPT_SUFFIX, Form, StatePath
from protokv.state.objects import ObjectForm
from protokv.state.pt import PtForm
from protokv.state.safetensors import SafetensorsForm
from protokv.state.zarr import ZarrForm
from protokv.texts import find_broken
from protokv.video.address import VIDEO_SUFFIXES

DEFAULT_SUFFIX = ".safetensors"

# File systems allow names of 255 bytes; the suffix and the names of kept and unfinished commits take some of them.
_LONGEST_STEM_BYTES = 200

_OWN: Mapping[str, type[Form]] = {one.suffix: one for one in (SafetensorsForm, ZarrForm, PtForm)}

_URL = re.compile(r"[a-z][a-z0-9+.-]+://")


@cache
def load_forms() -> Mapping[str, type[Form]]:
    """Return the forms by suffix: those of this package and the registered ones."""
    return {one.name: one.load() for one in entry_points(group="protokv.forms")} | dict(_OWN)


def is_url(path: StatePath) -> bool:
    """Return True if a path names a place outside the file system."""
    return isinstance(path, str) and _URL.match(path) is not None


def name_state(stem: str) -> str:
    """Return the file name of a state for what it is of; a long one is cut, and ends in a digest of all of it."""
    name = os.fsencode(stem)
    if len(name) > _LONGEST_STEM_BYTES:
        stem = f"{name[: _LONGEST_STEM_BYTES - 9].decode(errors='ignore')}-{hashlib.sha256(name).hexdigest()[:8]}"
    return stem + DEFAULT_SUFFIX


def find_suffix(path: StatePath) -> str | None:
    """Return the suffix that chooses the form of a state or kept commit; None if there is none."""
    name = KEPT_SUFFIX.sub("", os.fspath(path).rstrip("/"))
    return next((suffix for suffix in load_forms() if name.endswith(suffix)), None)


def open_form(path: StatePath, *, to_read: bool = False) -> Form:
    """Return the form of a state at this path. With `to_read`, a file without a suffix has the default form.

    Raises:
        UnknownForm: the suffix names no form, or it is that of a video; or the path is not UTF-8.
        StateError: a package that the form needs is not installed.
    """
    if find_broken(str(path)) is not None:
        # Found out by the libraries of the forms only when a whole video is watched.
        raise UnknownForm(f"the path {path} is not UTF-8", hint="choose another name")
    suffix, outside = find_suffix(path), is_url(path)
    if to_read and suffix is None and not outside:
        if PurePath(path).suffix.lower() in VIDEO_SUFFIXES:
            watch = f"watch it first: protokv ingest {path}; it writes {PurePath(path).stem}{DEFAULT_SUFFIX}"
            raise UnknownForm(f"{path} is a video, not a state", hint=watch)
        suffix = DEFAULT_SUFFIX
    known = {name: one for name, one in load_forms().items() if not outside or one.kind == "file"}
    if suffix not in known:
        raise UnknownForm(
            f"expected a path that ends in one of {', '.join(sorted(known))}, got {path}",
            hint=did_you_mean(PurePath(path).suffix, known) or "choose another name",
        )
    try:
        return ObjectForm(os.fspath(path), known[suffix]) if outside else known[suffix](path)
    except SourceError as error:
        raise StateError(error.message, hint=error.hint) from error
