"""Puts a file in place so that its path holds the old or the new one whole, whatever happens in between.

A temporary file in the same folder is written, synced, its size checked, moved over the path, and the folder
synced. What an earlier, killed commit left behind is removed by the next. All calls that touch the disk go
through a `FileSystem`, so that tests can make each of them fail. Knows nothing of what is written.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

from protokv.errors import StateError

_UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF}

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
        """Remove a file, if it is there."""
        path.unlink(missing_ok=True)


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
        # Hidden, and with a name of its own: two writers never write into the same file.
        prefix = f".{target.name}."
        temporary = target.parent / f"{prefix}{os.getpid()}-{secrets.token_hex(4)}.partial"
        for stale in fs.leftovers(target.parent, prefix):
            if stale.name.endswith(".partial"):
                fs.remove(stale)
    except (OSError, ValueError) as error:
        raise _refused(path, error) from error
    try:
        expected = write(temporary)
        found = fs.size(temporary)
        if found != expected:
            raise OSError(errno.EIO, f"{found} of {expected} bytes were written")
        fs.replace(temporary, target)
    except BaseException as error:
        _discard(temporary, fs)
        if isinstance(error, OSError):
            raise _refused(path, error) from error
        raise
    try:
        fs.sync_folder(target.parent)
    except OSError as error:
        raise _refused(path, error) from error


def _discard(path: Path, fs: FileSystem) -> None:
    try:
        fs.remove(path)
    except OSError:
        # The error that led here says more; the next commit removes what is left.
        return


def _refused(path: str | os.PathLike[str], error: OSError | ValueError) -> StateError:
    number = getattr(error, "errno", None)
    why = getattr(error, "strerror", None) or str(error)
    return StateError(f"cannot write the state {os.fspath(path)}: {why}", hint=_HINTS.get(number or 0, ""))
