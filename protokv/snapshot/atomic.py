"""Puts a file in place so that its path holds the old or the new one whole, whatever happens in between.

A temporary file in the same folder is written, synced, its size checked, moved over the path, and the folder
synced. `keep_as` gives what stands there a second name in the same way, without copying it, and `retire` takes one
away. What an earlier, killed commit left behind is removed by the next. All calls that touch the disk go through a
`FileSystem`, so that tests can make each of them fail. Knows nothing of what is written.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

from protokv.errors import StateError

_UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF}
_NO_LINKS = {errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}

_HINTS = {
    errno.ENOSPC: "free some space, or write elsewhere",
    errno.EDQUOT: "free some space, or write elsewhere",
    errno.ENOENT: "create the folder first",
    errno.ENOTDIR: "create the folder first",
    errno.EACCES: "choose a folder that you may write to",
    errno.EPERM: "choose a folder that you may write to",
    errno.EROFS: "choose a folder that you may write to",
    errno.EISDIR: "name a file, not a folder",
    errno.ENAMETOOLONG: "choose a shorter name",
}


class FileSystem:
    """The calls that a commit makes, one method each."""

    def create(self, path: Path) -> BinaryIO:
        """A new, empty file open for writing; its mode is 0666 less the umask."""
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666), "wb")

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        """Append to an open file."""
        file.write(data)

    def sync(self, file: BinaryIO) -> None:
        """Bring what was written to the disk."""
        file.flush()
        os.fsync(file.fileno())

    def size(self, path: Path) -> int:
        """Bytes that the file has on disk."""
        return path.stat().st_size

    def replace(self, source: Path, target: Path) -> None:
        """Move over `target` in one act."""
        source.replace(target)

    def sync_folder(self, folder: Path) -> None:
        """Bring the folder's entries to the disk, where the system can."""
        if os.name == "nt":
            return
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        except OSError as error:
            # Some network file systems cannot; the rename itself is still one act.
            if error.errno not in _UNSUPPORTED:
                raise
        finally:
            os.close(number)

    def leftovers(self, folder: Path, prefix: str) -> Iterable[Path]:
        """Files in the folder whose name begins like this."""
        return [Path(entry.path) for entry in os.scandir(folder) if entry.name.startswith(prefix)]

    def remove(self, path: Path) -> None:
        """Remove a file, or a folder with all that is in it, if it is there."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name; a copy where the file system has no such thing."""
        try:
            target.hardlink_to(source)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            with source.open("rb") as file, self.create(target) as copy:
                shutil.copyfileobj(file, copy)
                self.sync(copy)

    def make_folder(self, path: Path) -> None:
        """A new, empty folder."""
        path.mkdir()


DISK = FileSystem()


def write_file(path: Path, parts: Iterable[bytes | memoryview], fs: FileSystem = DISK) -> int:
    """Write parts to a new file and sync it; returns the bytes written. For use in `commit`."""
    written = 0
    file = fs.create(path)
    try:
        for part in parts:
            fs.write(file, part)
            written += len(part)
        fs.sync(file)
    finally:
        file.close()
    return written


def partial_path(target: Path) -> Path:
    """A hidden name beside `target` for what is not yet or no longer there; `sweep` removes what has such a name."""
    # With a name of its own: two writers never write into the same file.
    return target.parent / f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.partial"


def sweep(target: Path, fs: FileSystem = DISK) -> None:
    """Remove what a killed commit to `target` left behind."""
    for stale in fs.leftovers(target.parent, f".{target.name}."):
        if stale.name.endswith(".partial"):
            fs.remove(stale)


def keep_as(target: Path, name: Path, fs: FileSystem = DISK) -> None:
    """Let `name`, in the same folder, hold what `target` holds now, and go on holding it when `target` is replaced.

    A file gets a second name; a folder becomes a second folder of second names, which is enough where files in it are
    replaced and never written to. `name` appears whole or not at all; what it held before is lost.
    """
    temporary = partial_path(target)
    _link_all(target, temporary, fs)
    if name.is_dir():
        retire(target, name, fs)
    fs.replace(temporary, name)
    # To move a second name of a file over the first one does nothing.
    fs.remove(temporary)
    fs.sync_folder(target.parent)


def retire(target: Path, name: Path, fs: FileSystem = DISK) -> None:
    """Remove what `keep_as` made for `target`; it disappears in one act."""
    temporary = partial_path(target)
    is_folder = name.is_dir()
    fs.replace(name, temporary)
    if is_folder:
        # Or a crash may undo the move and not the removal of what is in it.
        fs.sync_folder(target.parent)
    fs.remove(temporary)


def _link_all(source: Path, target: Path, fs: FileSystem) -> None:
    if not source.is_dir():
        fs.link(source, target)
        return
    fs.make_folder(target)
    for entry in sorted(source.iterdir()):
        _link_all(entry, target / entry.name, fs)
    fs.sync_folder(target)


def commit(path: str | os.PathLike[str], write: Callable[[Path], int], fs: FileSystem = DISK) -> None:
    """Let `write` make a file at the path it is given, and put that in place of `path`.

    `write` syncs its file and returns the bytes that it must have. A link at `path` stays a link, and what it
    points to is replaced.

    Raises:
        StateError: It could not be written; what was at `path` before is still there.
    """
    try:
        target = Path(os.path.realpath(path))
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        temporary = partial_path(target)
        sweep(target, fs)
    except (OSError, ValueError) as error:
        raise refused(path, error) from error
    try:
        expected = write(temporary)
        found = fs.size(temporary)
        if found != expected:
            raise OSError(errno.EIO, f"{found} of {expected} bytes were written")
        fs.replace(temporary, target)
    except BaseException as error:
        _discard(temporary, fs)
        if isinstance(error, OSError):
            raise refused(path, error) from error
        raise
    try:
        fs.sync_folder(target.parent)
    except OSError as error:
        raise refused(path, error) from error


def _discard(path: Path, fs: FileSystem) -> None:
    try:
        fs.remove(path)
    except OSError:
        # The error that led here says more; the next commit removes what is left.
        return


def refused(path: str | os.PathLike[str], error: OSError | ValueError) -> StateError:
    """The error of a state that cannot be written, and what to do about it."""
    number = getattr(error, "errno", None)
    why = getattr(error, "strerror", None) or str(error)
    return StateError(f"cannot write the state {os.fspath(path)}: {why}", hint=_HINTS.get(number or 0, ""))
