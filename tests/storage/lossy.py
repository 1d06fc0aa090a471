"""A disk that forgets in a crash what was not synced: a model beside the real folder that the code under test sees.

Bytes of a file are durable once the file was synced, names in a folder once the folder was; what was not may have
reached the disk or not, in any order and in part. `Lossy` carries out every call and raises `Killed` after the n-th;
`survivor` then writes one of the folders that a machine could find when it is switched on again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import BinaryIO

from tests.storage.disk import Disk, File


class Killed(BaseException):
    """The machine is off: nothing after this call happens."""


@dataclass(eq=False)
class Bytes:
    now: bytes = b""
    durable: bytes = b""


@dataclass(eq=False)
class Names:
    """A folder: what is in it, what of that is durable, and the changes since, each atomic."""

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
        """Yield what is left if everything reached the disk, if only synced data did, and `n` random cases between."""
        yield _surviving(self.tree, lambda: 1.0)
        yield _surviving(self.tree, lambda: 0.0)
        for _ in range(n):
            yield _surviving(self.tree, random.random)


def _surviving(node: Bytes | Names, luck) -> Bytes | Names:
    if isinstance(node, Bytes):
        if node.now == node.durable:
            return node
        # A file that was synced and written to again does not occur; what was not synced may be there in part.
        return Bytes(now=node.now[: round(luck() * len(node.now))])
    names = dict(node.durable)
    for change in node.pending:
        if luck() >= 0.5:
            # A move of what never came to be moves nothing.
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
