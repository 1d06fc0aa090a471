"""Where the states of a fleet are: below a folder, or below a prefix in an object store; naming and finding them.

In a folder the state of the key `monday/door` is `monday/door.safetensors`. In an object store it is a repository of
many objects, so its name says where it ends: `monday/door.icechunk`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from protokv.errors import StateNotFound
from protokv.object_store import list_folders
from protokv.snapshot import DEFAULT_SUFFIX, FORMS, is_url

REPOSITORY = ".icechunk"


def target_of(place: str, key: str) -> str:
    """Where the state of a key is."""
    return f"{place.rstrip('/')}/{key}{REPOSITORY}" if is_url(place) else str(Path(place, key + DEFAULT_SUFFIX))


def is_place(path: str) -> bool:
    """Whether a path stands for the states below it, and not for one."""
    if is_url(path):
        return path.endswith("/")
    folder = Path(path)
    return folder.suffix not in FORMS and (folder.is_dir() or path.endswith(("/", os.sep)))


def find_states(place: str) -> list[str]:
    """The states below a place, sorted by name; whether they can be read is not asked.

    Raises:
        StateNotFound: there is none.
    """
    found = sorted(list_folders(place, REPOSITORY) if is_url(place) else _below(Path(place)))
    if not found:
        raise StateNotFound(f"there is no state in {place}", hint="ingest into it: protokv ingest VIDEOS -o DIR/")
    return found


def _below(folder: Path) -> Iterator[str]:
    for where, folders, names in os.walk(folder):
        # A .zarr is a folder itself. The name of a kept commit ends in its time.
        for name in [*folders, *names]:
            if name.endswith(tuple(FORMS)) and not name.startswith("."):
                yield str(Path(where, name))
        folders[:] = [name for name in folders if not name.startswith(".") and not name.endswith(tuple(FORMS))]
