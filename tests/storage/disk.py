"""File systems for tests of commits: one that never waits for the disk, one that fails, and one for crashes.

`Recorded` records the calls of a commit, and `after_crash` writes a folder that a machine could find if it lost power
after some of them. The bytes of a file are durable once the file was synced, the names in a folder once the folder was;
other changes may have reached the disk or not, in any order and in part.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
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


class Recorded(Fast):
    """A disk that records its calls; each is a tuple of name, path and another argument, if any."""

    # True if this system can exchange two names atomically.
    exchanges = True

    def __init__(self, root: Path) -> None:
        self.root, self.calls = root, []

    def create(self, path: Path) -> File:
        self.calls.append(("create", path))
        return super().create(path)

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        super().write(file, data)
        self.calls.append(("write", Path(file.name), bytes(data)))

    def sync(self, file: File) -> None:
        super().sync(file)
        self.calls.append(("sync", Path(file.name)))

    def exchange(self, a: Path, b: Path) -> bool:
        if self.exchanges:
            assert super().exchange(a, b)
            self.calls.append(("exchange", a, b))
        return self.exchanges

    def replace(self, source: Path, target: Path) -> None:
        super().replace(source, target)
        # With two names of one file, nothing is moved.
        if not source.exists():
            self.calls.append(("replace", source, target))

    def remove(self, path: Path) -> None:
        for one in sorted(path.iterdir()) if path.is_dir() else ():
            self.remove(one)
        if os.path.lexists(path):
            super().remove(path)
            self.calls.append(("remove", path))


def _recorded(name: str) -> Any:
    def call(self: Recorded, *arguments: Path) -> None:
        getattr(super(Recorded, self), name)(*arguments)
        self.calls.append((name, *arguments))

    return call


for _name in ("sync_folder", "link", "make_folder"):
    setattr(Recorded, _name, _recorded(_name))


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

    def change(self, names: dict[str, Bytes | Names | None]) -> None:
        self.pending.append(names)
        _apply(self.now, names)


def _apply(names: dict[str, Bytes | Names], change: dict[str, Bytes | Names | None]) -> None:
    names |= change
    for name in [name for name, node in names.items() if node is None]:
        del names[name]


def _scan(folder: Path) -> Names:
    found = {p.name: _scan(p) if p.is_dir() else Bytes(p.read_bytes(), p.read_bytes()) for p in folder.iterdir()}
    return Names(dict(found), dict(found))


def after_crash(base: Path, root: Path, calls: list[tuple], luck: Callable[[], float], folder: Path) -> Path:
    """Write to a new folder what a crash left of `base` after calls in `root`, a copy of it.

    An unsynced change reached the disk if `luck` returns 0.5 or more; of unsynced bytes, it returns the share.
    """
    tree = _scan(base)

    def find(path: Path) -> Names:
        node = tree
        for part in path.relative_to(root).parts:
            node = node.now[part]
        return node

    for name, path, *rest in calls:
        if name == "sync_folder":
            synced = find(path)
            synced.durable, synced.pending = dict(synced.now), []
            continue
        names = find(path.parent)
        node = names.now.get(path.name)
        match name:
            case "create" | "make_folder":
                names.change({path.name: Bytes() if name == "create" else Names()})
            case "write":
                node.now += rest[0]
            case "sync":
                node.durable = node.now
            case "remove":
                names.change({path.name: None})
            case "link":
                find(rest[0].parent).change({rest[0].name: node})
            case "replace" | "exchange":
                assert path.parent == rest[0].parent, "a move between folders is not atomic"
                other = names.now[rest[0].name] if name == "exchange" else None
                names.change({path.name: other, rest[0].name: node})
    _write(tree, luck, folder)
    return folder


def _write(names: Names, luck: Callable[[], float], folder: Path) -> None:
    left = dict(names.durable)
    for change in names.pending:
        if luck() >= 0.5:
            _apply(left, change)
    folder.mkdir()
    for name, node in left.items():
        if isinstance(node, Names):
            _write(node, luck, folder / name)
        else:
            # No file is written to after it was synced.
            whole = node.now == node.durable
            (folder / name).write_bytes(node.now if whole else node.now[: round(luck() * len(node.now))])
