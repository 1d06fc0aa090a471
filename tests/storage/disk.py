"""Replace the file system calls of a commit while a `with` block lasts."""

from __future__ import annotations

import os
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
    """The real disk; subclasses record its calls or let them fail."""

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


class Fast(Disk):
    """The real file system without waiting for the disk."""

    def sync(self, file: File) -> None:
        file.flush()

    def sync_folder(self, folder: Path) -> None:
        pass


class Failing(Fast):
    """A disk on which call number `at` fails with an error, once or from then on."""

    def __init__(self, at: int, error: int, *, once: bool) -> None:
        self.at, self.error, self.once, self.count = at, error, once, 0

    def step(self) -> bool:
        self.count += 1
        return self.count == self.at or (self.count > self.at and not self.once)


def _failing(name: str) -> Any:
    def call(self: Failing, *arguments: Any) -> Any:
        if self.step():
            if name == "write":
                # Half of the bytes arrive.
                file, data = arguments
                file.write(bytes(data)[: len(data) // 2])
                file.flush()
            raise OSError(self.error, os.strerror(self.error))
        return getattr(super(Failing, self), name)(*arguments)

    return call


for _name in ("create", "write", "sync", "replace", "exchange", "sync_folder", "link", "make_folder"):
    setattr(Failing, _name, _failing(_name))
