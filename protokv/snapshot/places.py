"""Where the keys of a zarr hierarchy are kept: a folder, or an object store.

A place holds values by key. Pieces are put first, `settle` makes them durable, and `commit` puts the one value that
names them, in one act. Owns what differs between folders and stores; knows nothing of what the values mean. All that
goes wrong is an OSError.
"""

from __future__ import annotations

import functools
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from protokv.errors import StateError
from protokv.snapshot.atomic import DISK, FileSystem, commit, write_file
from protokv.snapshot.side_by_side import threads

if TYPE_CHECKING:
    from obstore.store import ObjectStore

# Requests in flight at a time to a store that is far away.
_PARALLEL = 8

# Files that may be open at a time; systems allow 256 or more.
_OPEN_FILES = 96


class Place(Protocol):
    """Values by key.

    Attributes:
        writers, readers: how many calls of `put`, and of `read`, are worth making side by side.
    """

    writers: int
    readers: int

    def sizes(self) -> dict[str, int]:
        """Bytes of every value below `pieces/`."""

    def read(self, key: str, limit: int) -> NDArray[np.uint8] | None:
        """A value, writable; None if it is not there or has more than `limit` bytes."""

    def exists(self) -> bool:
        """Whether anything at all is there."""

    def put(self, piece: str, values: Mapping[str, bytes | memoryview]) -> None:
        """The values of a piece, by key, instead of what is there."""

    def settle(self) -> None:
        """Make all that was put durable."""

    def close(self) -> None:
        """Let go of what was put; it need not have settled."""

    def commit(self, key: str, value: bytes) -> None:
        """Put a value in one act, durably."""

    def discard(self, piece: str) -> None:
        """Remove a piece."""


class Folder:
    """A folder of the file system; every file is whole before its name is there, or is named by nothing yet."""

    # A disk takes one at a time; what is read is hashed too.
    writers, readers = 1, threads()

    def __init__(self, root: Path, fs: FileSystem = DISK) -> None:
        # A link to a folder stays one.
        self.root, self._fs = Path(os.path.realpath(root)), fs
        self._pieces = self.root / "pieces"
        self._unsynced: list[BinaryIO] = []
        self._folders: list[Path] = []

    def sizes(self) -> dict[str, int]:
        """Bytes of the regular files below `pieces`."""
        found = {}
        for entry in self._entries(self._pieces):
            for file in self._entries(Path(entry.path)) if entry.is_dir() else [entry]:
                # A writer may remove what was there a moment ago.
                with suppress(FileNotFoundError):
                    status = file.stat()
                    if stat.S_ISREG(status.st_mode):
                        found[Path(file.path).relative_to(self.root).as_posix()] = status.st_size
        return found

    def read(self, key: str, limit: int) -> NDArray[np.uint8] | None:
        """A regular file."""
        try:
            # A pipe would be waited for.
            flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
            with os.fdopen(os.open(self.root / key, flags), "rb", buffering=0) as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode) or status.st_size > limit:
                    return None
                data = np.empty(status.st_size, np.uint8)
                filled = 0
                while filled < len(data) and (n := file.readinto(data.data[filled:])):
                    filled += n
                return data if filled == len(data) else None
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None

    def exists(self) -> bool:
        """Whether there is more than what a first, killed commit leaves behind."""
        return any(not (e.name == "pieces" or e.name.endswith(".partial")) for e in self._entries(self.root))

    def put(self, piece: str, values: Mapping[str, bytes | memoryview]) -> None:
        """A folder of files; not yet named by anything, so it need not appear in one act."""
        if self._pieces.is_symlink():
            raise OSError("its folder of pieces is a link to elsewhere")
        self._make(self.root, self._pieces)
        target = self._pieces / piece
        self._fs.remove(target)
        self._fs.make_folder(target)
        self._folders.append(target)
        for key, value in values.items():
            file = self._fs.create(self.root / key)
            self._unsynced.append(file)
            self._fs.write(file, value)
        # The first sync of several brings most of the others to the disk with it.
        if len(self._unsynced) >= _OPEN_FILES:
            self._sync()

    def settle(self) -> None:
        """Sync files and folders, up to the one that holds this one."""
        self._sync()
        for folder in (self._pieces, self.root, self.root.parent):
            if folder.is_dir():
                self._fs.sync_folder(folder)

    def _sync(self) -> None:
        for file in self._unsynced:
            self._fs.sync(file)
        for folder in self._folders:
            self._fs.sync_folder(folder)
        self.close()

    def close(self) -> None:
        """Close the files that wait for their sync."""
        while self._unsynced:
            self._unsynced.pop().close()
        self._folders.clear()

    def commit(self, key: str, value: bytes) -> None:
        """Replace a file."""
        target = self.root / key
        self._make(self.root, target.parent)
        commit(target, lambda temporary: write_file(temporary, [value], self._fs), self._fs)

    def discard(self, piece: str) -> None:
        """Remove the folder of a piece."""
        if not self._pieces.is_symlink():
            self._fs.remove(self._pieces / piece)

    def _make(self, *folders: Path) -> None:
        for folder in folders:
            if not folder.is_dir():
                self._fs.make_folder(folder)

    @staticmethod
    def _entries(folder: Path) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(folder) as entries:
                return list(entries)
        except (FileNotFoundError, NotADirectoryError):
            return []


class Remote:
    """A prefix of an object store, through obstore: S3 and what speaks its language, Google, Azure, memory."""

    writers = readers = _PARALLEL

    def __init__(self, url: str) -> None:
        self._store = _store(url)

    def sizes(self) -> dict[str, int]:
        """Bytes of the objects below `pieces/`."""
        import obstore

        with _as_os_error():
            return {one["path"]: one["size"] for batch in obstore.list(self._store, "pieces") for one in batch}

    def read(self, key: str, limit: int) -> NDArray[np.uint8] | None:
        """An object."""
        import obstore

        with _as_os_error():
            try:
                found = obstore.get(self._store, key)
                return None if found.meta["size"] > limit else np.frombuffer(memoryview(found.bytes()), np.uint8).copy()
            except FileNotFoundError:
                return None

    def exists(self) -> bool:
        """Whether there is any object but those that a first, killed commit leaves behind."""
        import obstore

        with _as_os_error():
            found = (one["path"] for batch in obstore.list(self._store) for one in batch)
            return any(not path.startswith("pieces/") for path in found)

    def put(self, piece: str, values: Mapping[str, bytes | memoryview]) -> None:
        """Objects; a store has each of them whole or not at all."""
        for key, value in values.items():
            self.commit(key, bytes(value))

    def settle(self) -> None:
        """An object is durable when the store says that it has it."""

    def close(self) -> None:
        """Nothing is held."""

    def commit(self, key: str, value: bytes) -> None:
        """Put an object."""
        import obstore

        with _as_os_error():
            obstore.put(self._store, key, value)

    def discard(self, piece: str) -> None:
        """Delete the objects of a piece."""
        import obstore

        with _as_os_error():
            found = [one["path"] for batch in obstore.list(self._store, f"pieces/{piece}") for one in batch]
            if found:
                obstore.delete(self._store, found)


def place_of(path: str | os.PathLike[str], *, remote: bool, fs: FileSystem = DISK) -> Place:
    """The place that a path or a URL names.

    Raises:
        StateError: The URL names no store that can be used here.
    """
    return Remote(os.fspath(path)) if remote else Folder(Path(path), fs)


@contextmanager
def _as_os_error() -> Iterator[None]:
    from obstore.exceptions import BaseError

    try:
        yield
    except BaseError as error:
        raise OSError(str(error).splitlines()[0]) from error


@functools.cache
def _memory(name: str) -> ObjectStore:
    """The store of a `memory://` URL: it is there as long as the process is."""
    from obstore.store import MemoryStore

    return MemoryStore()


def _store(url: str) -> ObjectStore:
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError as error:
        hint = "pip install 'protokv[object-store]'"
        raise StateError(f"{url} is in an object store, and obstore is not installed", hint=hint) from error
    if url.startswith("memory://"):
        return _memory(url.rstrip("/"))
    try:
        return from_url(url)
    except (BaseError, ValueError, TypeError) as error:
        scheme = re.split("://", url)[0]
        why = str(error).splitlines()[0]
        raise StateError(f"cannot use the object store {url}: {why}", hint=f"is {scheme} what you mean?") from error
