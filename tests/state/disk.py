"""File systems for tests of commits: one that never waits for the disk, and one for crashes.

`Recorded` records the calls of a commit, and `after_crash` writes a folder that a machine could find if it lost power
after some of them. The bytes of a file are durable once the file was synced, the names in a folder once the folder was;
other changes may have reached the disk or not, in any order and in part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Self

import pytest

from protokv.state import filesystem

CALLS = ("create", "sync", "replace", "exchange", "sync_folder", "remove", "link", "make_folder")
_REAL = {name: getattr(filesystem, name) for name in CALLS}


class File:
    """A new file that passes its writes to a `Disk`."""

    def __init__(self, file: BinaryIO, disk: Disk) -> None:
        self._file, self._disk = file, disk

    def write(self, data) -> int:
        self._disk.call("write", self._file, data)
        return len(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class Disk:
    """Takes the file system calls of a commit within a `with` block, and the writes to its files."""

    def __enter__(self) -> Self:
        self._patch = pytest.MonkeyPatch()
        for name in CALLS:
            self._patch.setattr(filesystem, name, partial(self.call, name))
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()

    def call(self, name: str, *arguments: Any) -> Any:
        """Make a call, or do what this disk does instead."""
        if name == "write":
            file, data = arguments
            return file.write(data)
        made = _REAL[name](*arguments)
        return File(made, self) if name == "create" else made


class Fast(Disk):
    """The real file system without waiting for the disk."""

    def call(self, name: str, *arguments: Any) -> Any:
        if name == "sync":
            return arguments[0].flush()
        return None if name == "sync_folder" else super().call(name, *arguments)


class Recorded(Fast):
    """A disk that records its calls; each is a tuple of name, path and another argument, if any."""

    # True if this system can exchange two names atomically.
    exchanges = True

    def __init__(self, root: Path) -> None:
        self.root, self.calls = root, []

    def call(self, name: str, *arguments: Any) -> Any:
        if name == "exchange" and not self.exchanges:
            return False
        if name == "remove" and arguments[0].is_dir():
            for one in sorted(arguments[0].iterdir()):
                self.call("remove", one)
        made = super().call(name, *arguments)
        assert name != "exchange" or made
        # With two names of one file, nothing is moved.
        if name != "replace" or not arguments[0].exists():
            first, *rest = arguments
            path = Path(first.name) if name in ("write", "sync") else first
            self.calls.append((name, path, *map(bytes, rest)) if name == "write" else (name, path, *rest))
        return made


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
