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

from protokv.errors import StateCorrupt, shown
from protokv.snapshot import filesystem
from protokv.snapshot.commit import replace, writing
from protokv.snapshot.document import KEY, not_ours
from protokv.snapshot.form import Stored
from protokv.snapshot.formats.hierarchy import DOCUMENT_LIMIT_BYTES, ROOT, Hierarchy, as_bytes, write_state
from protokv.snapshot.formats.local import LocalForm
from protokv.state import State

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
            raise not_ours(self.path, f", or holds more ({shown(strange)})")

    def replace(self, state: State) -> None:
        """Put the hierarchy in place."""
        self.check_target()
        with writing(self.path):
            replace(self.target, lambda folder: _write(state, folder))

    def open(self, target: Path) -> Stored:
        """The folder, once all of its files are seen."""
        sizes = _files(target)
        return Hierarchy(LocalStore(target, read_only=True), lambda keys: {key: sizes.get(key, 0) for key in keys})


class _Folder(LocalStore):
    """A new folder that the zarr library writes into: every file is written once, synced, and by a few threads."""

    def __init__(self, root: Path, pool: ThreadPoolExecutor) -> None:
        super().__init__(root)
        self._pool, self.folders = pool, [root]
        filesystem.make_folder(root)

    async def set(self, key: str, value: Buffer) -> None:
        """Write a file. Tensors of one group share its metadata."""
        file = self.root / key
        for folder in reversed(file.relative_to(self.root).parents):
            if self.root / folder not in self.folders:
                filesystem.make_folder(self.root / folder)
                self.folders.append(self.root / folder)
        if not file.exists():
            data = as_bytes(value)
            await asyncio.wrap_future(self._pool.submit(filesystem.write_file, file, lambda out: out.write(data)))


def _write(state: State, root: Path) -> None:
    """A new hierarchy, synced. No thread writes when this has returned or raised."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        store = _Folder(root, pool)
        write_state(state, store)
    for folder in reversed(store.folders):
        filesystem.sync_folder(folder)


def _files(root: Path) -> dict[str, int]:
    """Bytes of every file, by its path from the root; anything but files and folders is refused."""
    sizes: dict[str, int] = {}
    # No link is followed.
    for n, path in enumerate(root.rglob("*")):
        key, status = path.relative_to(root).as_posix(), path.lstat()
        if stat.S_ISREG(status.st_mode):
            sizes[key] = status.st_size
        elif not stat.S_ISDIR(status.st_mode):
            raise StateCorrupt(f"{shown(key)} is neither a file nor a folder")
        if n > _MOST_FILES:
            raise StateCorrupt(f"more than {_MOST_FILES} files")
    return sizes


def _strange(target: Path) -> str:
    """What stands there and is not of a state of ours, whole or damaged, so that none of it may be replaced."""
    if not target.is_dir() or not any(target.iterdir()):
        return ""
    root = target / ROOT
    ours = root.is_file() and not root.is_symlink() and root.stat().st_size <= DOCUMENT_LIMIT_BYTES
    if not ours or f'"{KEY}"'.encode() not in root.read_bytes():
        return ROOT
    # A link to a folder is not walked into, and goes with the state.
    for folder, _, files in os.walk(target):
        for name in files:
            if name != ROOT and not re.fullmatch(r"c(\.\d+)*", name):
                return str(Path(folder, name).relative_to(target))
    return ""
