"""The file system calls of a commit. Tests replace them with calls that fail or lose data.

No call follows a link: a commit creates new files, and it links, moves and removes the entries themselves.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

make_folder, replace = os.mkdir, os.replace

_UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF}
_NO_LINKS = {errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}

# renameat2(2) of Linux: https://man7.org/linux/man-pages/man2/rename.2.html
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def create(path: Path) -> BinaryIO:
    """Create an empty file and open it for writing; its mode is 0666 less the umask."""
    return path.open("xb")


def sync(file: BinaryIO) -> None:
    """Flush a file to the disk."""
    file.flush()
    os.fsync(file.fileno())


def exchange(a: Path, b: Path) -> bool:
    """Swap two names atomically; return False if the system cannot."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(b))


def sync_folder(folder: Path) -> None:
    """Flush the entries of a folder to the disk, if the system can."""
    if os.name == "nt":
        return
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        # Some network file systems cannot sync a folder; a rename is atomic there all the same.
        if error.errno not in _UNSUPPORTED:
            raise
    finally:
        os.close(number)


def remove(path: Path) -> None:
    """Remove a file or link, or a folder with everything in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def link(source: Path, target: Path) -> None:
    """Give a regular file a second name; copy it if the file system has no hard links."""
    if not stat.S_ISREG(source.lstat().st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(source))
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        with source.open("rb") as file, create(target) as copy:
            shutil.copyfileobj(file, copy)
            sync(copy)


def write_file(path: Path, fill: Callable[[BinaryIO], object]) -> None:
    """Create a file, let `fill` write it, and sync it."""
    with create(path) as file:
        fill(file)
        sync(file)
