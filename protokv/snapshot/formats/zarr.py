"""A state as a `.zarr` folder: a Zarr v3 hierarchy that every zarr library opens, replaced whole.

A commit writes a complete hierarchy beside the old one and lets the two change places. So a reader that had begun with
the old one finds another document and begins again. A hierarchy that is read is data: folders and files only, no links,
every file exactly as large as the sealed document leads to. What is in the files is for `hierarchy`.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from protokv.errors import StateCorrupt, StateError
from protokv.snapshot.commit import check_place, recover, refused, replace_folder
from protokv.snapshot.document import corrupt, not_found, parse_json, unreadable
from protokv.snapshot.filesystem import FileSystem, write_file
from protokv.snapshot.formats.base import StatePath
from protokv.snapshot.formats.hierarchy import (
    DOCUMENT_LIMIT_BYTES,
    KEY,
    METADATA_LIMIT_BYTES,
    ROOT,
    Stored,
    decode,
    document_of,
    encode_state,
    path_of,
    read_document,
)
from protokv.snapshot.formats.local import LocalForm
from protokv.snapshot.parallel import parallel
from protokv.snapshot.schema import Header, State
from protokv.snapshot.text import shown

# Far more than a state has; a folder of millions would only cost time.
_MOST_FILES = 1 << 18
_ATTEMPTS = 20


class ZarrForm(LocalForm):
    """One `.zarr` folder."""

    suffix = ".zarr"

    def check_target(self, path: StatePath) -> None:
        """Whether a hierarchy could be put there: nothing is there, or one of ours, damaged or not."""
        target = check_place(path)
        try:
            recover(target, self.fs)
            if target.exists() and not target.is_dir():
                raise StateError(f"cannot write the state {path}: it is a file", hint="Choose another name.")
            _check_ours(target, path)
        except OSError as error:
            raise refused(path, error) from error

    def replace(self, state: State, path: StatePath) -> None:
        """Put the hierarchy in place."""
        # A header that cannot be written is told before anything is.
        document_of(state, {})
        target = Path(os.path.realpath(path))
        try:
            _check_ours(target, path)
        except OSError as error:
            raise refused(path, error) from error
        replace_folder(path, lambda folder: _write(state, folder, self.fs), self.fs)

    def read(self, path: StatePath, *, verify: bool = True) -> State:
        """Read the hierarchy."""
        try:
            recover(Path(os.path.realpath(path)), self.fs)
            document = _root(path)
            for _ in range(_ATTEMPTS):
                try:
                    return _read(document, path, verify=verify)
                except (StateCorrupt, FileNotFoundError, NotADirectoryError) as error:
                    again = _root(path)
                    if again == document:
                        if isinstance(error, StateCorrupt):
                            raise
                        raise corrupt(path, f"{Path(str(error.filename)).name} is missing") from None
                    document = again
        except (OSError, ValueError) as error:
            raise unreadable(path, error) from error
        raise self._restless(path)

    def read_header(self, path: StatePath) -> Header:
        """Read and verify the header alone."""
        try:
            recover(Path(os.path.realpath(path)), self.fs)
            return read_document(parse_json(_root(path), path), path)[0]
        except (OSError, ValueError) as error:
            raise unreadable(path, error) from error

    def stored_bytes(self, path: StatePath) -> int:
        """Bytes of all files."""
        for _ in range(_ATTEMPTS):
            try:
                _root(path)
                return sum(_files(Path(os.path.realpath(path)), path).values())
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:
                raise unreadable(path, error) from error
        raise self._restless(path)

    def _restless(self, path: StatePath) -> StateError:
        return StateError(f"cannot read the state {os.fspath(path)}: it is rewritten all the time", hint="try again")


def _write(state: State, root: Path, fs: FileSystem) -> None:
    """A new hierarchy, synced."""
    folders = [root]
    fs.make_folder(root)
    for key, data, _ in encode_state(state):
        file = root / key
        for folder in reversed(file.relative_to(root).parents):
            if root / folder not in folders:
                fs.make_folder(root / folder)
                folders.append(root / folder)
        # Tensors of one group share its metadata.
        if not file.exists():
            write_file(file, [data], fs)
    for folder in reversed(folders):
        fs.sync_folder(folder)


def _read(document: bytes, path: StatePath, *, verify: bool) -> State:
    root = Path(os.path.realpath(path))
    header, stored = read_document(parse_json(document, path), path)
    sizes = _files(root, path)
    for name, one in stored.items():
        expected = one.layout.chunk_bytes
        for key in one.layout.chunk_keys(name):
            if sizes.get(key) != expected:
                found = f"{sizes[key]} bytes instead of {expected}" if key in sizes else "missing"
                raise corrupt(path, f"tensor {shown(name)}: its chunk {shown(key)} is {found}")
    calls = (partial(_tensor, root, name, one, path, verify) for name, one in stored.items())
    return State.of(header, dict(zip(stored, parallel(calls), strict=True)))


def _tensor(root: Path, name: str, stored: Stored, path: StatePath, verify: bool) -> Tensor:
    """A tensor whose chunks are there in their sizes."""
    metadata = _bytes(root / path_of(name) / ROOT, METADATA_LIMIT_BYTES)
    chunks = (_bytes(root / key, stored.layout.chunk_bytes) for key in stored.layout.chunk_keys(name))
    return decode(name, stored, None if metadata is None else metadata.tobytes(), chunks, path, verify=verify)


def _root(path: StatePath) -> bytes:
    root = Path(os.path.realpath(path))
    if os.path.lexists(root) and not root.is_dir():
        raise corrupt(path, "a link that leads to itself" if root.is_symlink() else "expected a folder")
    data = _bytes(root / ROOT, DOCUMENT_LIMIT_BYTES)
    if data is None:
        if root.is_dir() and any(root.iterdir()):
            raise corrupt(path, f"there is no {ROOT} that could be that of a state")
        raise not_found(path)
    return data.tobytes()


def _files(root: Path, path: StatePath) -> dict[str, int]:
    """Bytes of every file, by its path from the root; anything but files and folders is refused."""
    sizes: dict[str, int] = {}
    folders = [root]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                key = Path(entry.path).relative_to(root).as_posix()
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode):
                    folders.append(Path(entry.path))
                elif stat.S_ISREG(status.st_mode):
                    sizes[key] = status.st_size
                else:
                    raise corrupt(path, f"{shown(key)} is neither a file nor a folder")
                if len(sizes) + len(folders) > _MOST_FILES:
                    raise corrupt(path, f"more than {_MOST_FILES} files")
    return sizes


def _bytes(file: Path, limit: int) -> NDArray[np.uint8] | None:
    """The bytes of a regular file; None if it is not there, is something else, or has more than `limit` bytes."""
    # A pipe would be waited for, and a link is not ours.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    try:
        with os.fdopen(os.open(file, flags), "rb", buffering=0) as opened:
            status = os.fstat(opened.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > limit:
                return None
            data = np.empty(status.st_size, np.uint8)
            filled = 0
            while filled < len(data) and (n := opened.readinto(data[filled:].data)):
                filled += n
            return data if filled == len(data) else None
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO):
            return None
        raise


def _check_ours(target: Path, path: StatePath) -> None:
    """Whether what stands there may be replaced: a state of ours, whole or damaged, with nothing of anybody else's."""
    if not target.is_dir() or not any(target.iterdir()):
        return
    data = _bytes(target / ROOT, DOCUMENT_LIMIT_BYTES)
    strange = None if data is not None and f'"{KEY}"'.encode() in data.tobytes() else ROOT
    for folder, folders, files in os.walk(target):
        inside = Path(folder).relative_to(target).parts
        for name in files:
            if name != ROOT and not re.fullmatch(r"c(\.\d+)*", name):
                strange = "/".join([*inside, name])
        # A link to a folder is not walked into, and goes with the state.
        folders[:] = [name for name in folders if not (Path(folder) / name).is_symlink()]
    if strange is not None:
        raise StateError(
            f"cannot write the state {path}: what is there is no state of ours, or holds more ({shown(strange)})",
            hint="Remove it, or choose another name.",
        )
