"""Another file system in the place of the calls that a commit makes, for as long as a `with` block lasts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO, Self

import pytest

from protokv.storage import filesystem

CALLS = ("create", "sync", "replace", "exchange", "sync_folder", "remove", "link", "make_folder")
_REAL = {name: getattr(filesystem, name) for name in CALLS}


class File:
    """A new file whose writes are those of a disk."""

    def __init__(self, file: BinaryIO, disk: Disk) -> None:
        self._file, self._disk = file, disk

    def write(self, data) -> int:
        self._disk.write(self._file, data)
        return len(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class Disk:
    """The real one; subclasses note its calls, or let them fail."""

    def __enter__(self) -> Self:
        self._patch = pytest.MonkeyPatch()
        for name in CALLS:
            self._patch.setattr(filesystem, name, getattr(self, name))
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()

    def create(self, path: Path) -> File:
        return File(_REAL["create"](path), self)

    def write(self, file: BinaryIO, data) -> None:
        file.write(data)


for _name in set(CALLS) - {"create"}:
    setattr(Disk, _name, staticmethod(_REAL[_name]))
