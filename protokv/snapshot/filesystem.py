"""The calls to the file system that a commit makes, one method each, so that tests can make each of them fail.

None follows a link: what a commit makes is new, and what it gives a second name or removes is the thing itself.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

_UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF}
_NO_LINKS = {errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}

# renameat2(2) of Linux: https://man7.org/linux/man-pages/man2/rename.2.html
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


class FileSystem:
    """The real one."""

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

    def replace(self, source: Path, target: Path) -> None:
        """Move over `target` in one act; a folder can only replace an empty one, or nothing."""
        source.replace(target)

    def exchange(self, a: Path, b: Path) -> bool:
        """Let two names change places in one act; False where the system has no such act."""
        call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None
        if call is None:
            return False
        if call(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
            return True
        number = ctypes.get_errno()
        if number in _UNSUPPORTED:
            return False
        raise OSError(number, os.strerror(number), str(b))

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
        with os.scandir(folder) as entries:
            return [Path(entry.path) for entry in entries if entry.name.startswith(prefix)]

    def remove(self, path: Path) -> None:
        """Remove a file or link, or a folder with all that is in it, if it is there."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def link(self, source: Path, target: Path) -> None:
        """Give a regular file a second name; a copy where the file system has no such thing."""
        if not stat.S_ISREG(source.lstat().st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(source))
        try:
            os.link(source, target, follow_symlinks=False)
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


class Sink:
    """A new file that is written to; its bytes are counted, and its error is kept."""

    def __init__(self, file: BinaryIO, fs: FileSystem) -> None:
        self._file, self._fs, self.written = file, fs, 0
        self.failed: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Append."""
        try:
            self._fs.write(self._file, data)
        except OSError as error:
            self.failed = error
            raise
        self.written += len(data)
        return len(data)

    def flush(self) -> None:
        """Hand on what is buffered."""
        self._file.flush()


def write_file(path: Path, fill: Callable[[Sink], object], fs: FileSystem = DISK) -> None:
    """Write a new file with what `fill` puts into it, and sync it. OSError if that is not all there afterwards."""
    with fs.create(path) as file:
        sink = Sink(file, fs)
        try:
            fill(sink)
        except RuntimeError as error:
            # torch tells how it stumbled over the file's own error, not that one.
            raise sink.failed or error from None
        fs.sync(file)
        if (found := os.fstat(file.fileno()).st_size) != sink.written:
            raise OSError(errno.EIO, f"{found} of {sink.written} bytes were written")
