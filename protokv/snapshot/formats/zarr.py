"""A state as a `.zarr` folder: a Zarr v3 hierarchy that every zarr library opens, replaced whole.

A commit writes a complete hierarchy beside the old one and lets the two change places. A hierarchy that is read is
data: folders and files only, no links, every file exactly as large as the sealed document leads to. What is in the
files is for `hierarchy`.
"""

from __future__ import annotations

import asyncio
import os
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from zarr.core.buffer import Buffer
from zarr.storage import LocalStore

from protokv.errors import StateCorrupt, StateError, shown
from protokv.snapshot.commit import replace, writing
from protokv.snapshot.document import KEY, Admit
from protokv.snapshot.filesystem import FileSystem, write_file
from protokv.snapshot.formats.hierarchy import (
    DOCUMENT_LIMIT_BYTES,
    ROOT,
    as_bytes,
    read_document,
    read_state,
    write_state,
)
from protokv.snapshot.formats.local import LocalForm
from protokv.snapshot.schema import Header, State

# Far more than a state has; a folder of millions would only cost time.
_MOST_FILES = 1 << 18

# Files that are written and synced at a time: more wait for the disk together.
_AT_ONCE = 4


class ZarrForm(LocalForm):
    """One `.zarr` folder."""

    suffix = ".zarr"
    kind = "folder"

    def check_target(self) -> None:
        """Whether a hierarchy could be put there: nothing is there, or one of ours, damaged or not."""
        super().check_target()
        with writing(self.path):
            strange = _strange(self.target)
        if strange:
            raise StateError(
                f"cannot write the state {self.path}: what is there is no state of ours, or holds more "
                f"({shown(strange)})",
                hint="Remove it, or choose another name.",
            )

    def replace(self, state: State) -> None:
        """Put the hierarchy in place."""
        self.check_target()
        with writing(self.path):
            replace(self.target, lambda folder: _write(state, folder, self.fs), self.fs)

    def read(self, at: str | None = None, *, verify: bool = True, admit: Admit | None = None) -> State:
        """Read the hierarchy."""

        def read(root: Path) -> State:
            sizes = _files(root)
            store = LocalStore(root, read_only=True)
            return read_state(_document(root, sizes), store, sizes, verify=verify, admit=admit)

        return self.steady(at or self.path, read)

    def read_header(self, at: str | None = None) -> Header:
        """Read and verify the header alone."""
        return self.steady(at or self.path, lambda root: _document(root, _files(root))[0])

    def stored_bytes(self) -> int:
        """Bytes of all files."""
        return self.steady(self.path, lambda root: sum(_files(root).values()))


class _Folder(LocalStore):
    """A new folder that the zarr library writes into: every file is written once, synced, and by a few threads."""

    def __init__(self, root: Path, fs: FileSystem, pool: ThreadPoolExecutor) -> None:
        super().__init__(root)
        self._fs, self._pool, self.folders = fs, pool, [root]
        fs.make_folder(root)

    async def set(self, key: str, value: Buffer) -> None:
        """Write a file. Tensors of one group share its metadata."""
        file = self.root / key
        for folder in reversed(file.relative_to(self.root).parents):
            if self.root / folder not in self.folders:
                self._fs.make_folder(self.root / folder)
                self.folders.append(self.root / folder)
        if not file.exists():
            data = as_bytes(value)
            await asyncio.wrap_future(self._pool.submit(write_file, file, lambda sink: sink.write(data), self._fs))


def _write(state: State, root: Path, fs: FileSystem) -> None:
    """A new hierarchy, synced. No thread writes when this has returned or raised."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        store = _Folder(root, fs, pool)
        write_state(state, store)
    for folder in reversed(store.folders):
        fs.sync_folder(folder)


def _document(root: Path, sizes: dict[str, int]) -> tuple[Header, dict[str, str]]:
    return read_document((root / ROOT).read_bytes() if sizes.get(ROOT, 0) <= DOCUMENT_LIMIT_BYTES else None)


def _files(root: Path) -> dict[str, int]:
    """Bytes of every file, by its path from the root; anything but files and folders is refused."""
    sizes: dict[str, int] = {}
    folders = [""]
    while folders:
        prefix = folders.pop()
        with os.scandir(root / prefix) as entries:
            for entry in entries:
                key, status = prefix + entry.name, entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode):
                    folders.append(f"{key}/")
                elif stat.S_ISREG(status.st_mode):
                    sizes[key] = status.st_size
                else:
                    raise StateCorrupt(f"{shown(key)} is neither a file nor a folder")
                if len(sizes) + len(folders) > _MOST_FILES:
                    raise StateCorrupt(f"more than {_MOST_FILES} files")
    if ROOT not in sizes:
        raise StateCorrupt(f"there is no {ROOT} that could be that of a state")
    return sizes


def _strange(target: Path) -> str:
    """What stands there and is not of a state of ours, whole or damaged, so that none of it may be replaced."""
    if not target.is_dir() or not any(target.iterdir()):
        return ""
    root = target / ROOT
    ours = root.is_file() and not root.is_symlink() and root.stat().st_size <= DOCUMENT_LIMIT_BYTES
    if not ours or f'"{KEY}"'.encode() not in root.read_bytes():
        return ROOT
    for folder, folders, files in os.walk(target):
        for name in files:
            if name != ROOT and not re.fullmatch(r"c(\.\d+)*", name):
                return str(Path(folder, name).relative_to(target))
        # A link to a folder is not walked into, and goes with the state.
        folders[:] = [name for name in folders if not Path(folder, name).is_symlink()]
    return ""
