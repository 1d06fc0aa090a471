"""File systems for tests of commits: one that never waits for the disk, one that fails, and one that crashes.

`Lossy` models a disk that forgets in a crash what was not synced. The bytes of a file are durable once the file was
synced, the names in a folder once the folder was; other changes may have reached the disk or not, in any order and in
part. It carries out every call in the real folder too, and raises `Killed` after the n-th. `survivor` then writes one
of the folders that a machine could find after the crash.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, BinaryIO, Self

import pytest

from protokv.storage import filesystem

CALLS = ("create", "sync", "replace", "exchange", "sync_folder", "remove", "link", "make_folder")
_REAL = {name: getattr(filesystem, name) for name in CALLS}


class File:
    """A new file that passes its writes to a `Disk`."""

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
    """Replace the file system calls of a commit within a `with` block; subclasses record them or let them fail."""

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


class Killed(BaseException):
    """The machine is off; no later call happens."""


@dataclass(eq=False)
class Bytes:
    now: bytes = b""
    durable: bytes = b""


@dataclass(eq=False)
class Names:
    """A folder: its entries now, its durable entries, and the changes between them, each atomic."""

    now: dict[str, Bytes | Names] = field(default_factory=dict)
    durable: dict[str, Bytes | Names] = field(default_factory=dict)
    pending: list[dict[str, Bytes | Names | None]] = field(default_factory=list)

    def change(self, **names: Bytes | Names | None) -> None:
        self.pending.append(names)
        _apply(self.now, names)


def _apply(names: dict[str, Bytes | Names], change: dict[str, Bytes | Names | None]) -> None:
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


def _scan(folder: Path) -> Names:
    found = {p.name: _scan(p) if p.is_dir() else Bytes(p.read_bytes(), p.read_bytes()) for p in folder.iterdir()}
    return Names(dict(found), dict(found))


class Lossy(Disk):
    # True if this system can exchange two names atomically.
    exchanges = True

    def __init__(self, root: Path, at: int | None = None) -> None:
        self.root, self.at, self.calls = root, at, []
        self.tree = _scan(root)
        self._open: dict[BinaryIO, Bytes] = {}

    def _folder(self, path: Path) -> Names:
        node = self.tree
        for part in path.relative_to(self.root).parts:
            node = node.now[part]
        return node

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if len(self.calls) == self.at:
            raise Killed

    def _alive(self) -> None:
        if self.at is not None and len(self.calls) >= self.at:
            raise Killed

    def create(self, path: Path) -> File:
        self._alive()
        file = super().create(path)
        node = Bytes()
        self._folder(path.parent).change(**{path.name: node})
        self._open[file._file] = node
        try:
            self._called("create")
        except Killed:
            file.close()
            raise
        return file

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        self._alive()
        super().write(file, data)
        self._open[file].now += bytes(data)
        self._called("write")

    def sync(self, file: File) -> None:
        self._alive()
        file.flush()
        node = self._open[file._file]
        node.durable = node.now
        self._called("sync")

    def replace(self, source: Path, target: Path) -> None:
        self._alive()
        super().replace(source, target)
        folder = self._folder(source.parent)
        assert source.parent == target.parent, "a move between folders is not atomic"
        if source.exists():
            # Two names of one file: nothing was moved.
            assert source.samefile(target)
        else:
            folder.change(**{source.name: None, target.name: folder.now[source.name]})
        self._called("replace")

    def exchange(self, a: Path, b: Path) -> bool:
        self._alive()
        if not self.exchanges:
            return False
        assert super().exchange(a, b)
        assert a.parent == b.parent, "an exchange between folders is not atomic"
        folder = self._folder(a.parent)
        folder.change(**{a.name: folder.now[b.name], b.name: folder.now[a.name]})
        self._called("exchange")
        return True

    def sync_folder(self, folder: Path) -> None:
        self._alive()
        node = self._folder(folder)
        node.durable, node.pending = dict(node.now), []
        self._called("sync_folder")

    def remove(self, path: Path) -> None:
        self._alive()
        if path.is_dir():
            for one in sorted(path.iterdir()):
                self.remove(one)
        if os.path.lexists(path):
            super().remove(path)
            self._folder(path.parent).change(**{path.name: None})
        self._called("remove")

    def link(self, source: Path, target: Path) -> None:
        self._alive()
        super().link(source, target)
        self._folder(target.parent).change(**{target.name: self._folder(source.parent).now[source.name]})
        self._called("link")

    def make_folder(self, path: Path) -> None:
        self._alive()
        super().make_folder(path)
        self._folder(path.parent).change(**{path.name: Names()})
        self._called("make_folder")

    def survivors(self, random: Random, n: int) -> Iterator[Names]:
        """Yield the tree if everything reached the disk, if only synced data did, and in `n` random cases between."""
        yield _surviving(self.tree, lambda: 1.0)
        yield _surviving(self.tree, lambda: 0.0)
        for _ in range(n):
            yield _surviving(self.tree, random.random)


def _surviving(node: Bytes | Names, luck) -> Bytes | Names:
    if isinstance(node, Bytes):
        if node.now == node.durable:
            return node
        # No file is written to after it was synced. Bytes that were not synced may be there in part.
        return Bytes(now=node.now[: round(luck() * len(node.now))])
    names = dict(node.durable)
    for change in node.pending:
        if luck() >= 0.5:
            # A file that does not exist cannot be moved.
            _apply(names, change)
    return Names({name: _surviving(one, luck) for name, one in names.items()})


def survivor(tree: Names, folder: Path) -> Path:
    """Write a tree to a new folder."""
    folder.mkdir()
    for name, node in tree.now.items():
        if isinstance(node, Names):
            survivor(node, folder / name)
        else:
            (folder / name).write_bytes(node.now)
    return folder
