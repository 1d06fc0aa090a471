"""Replace a file or folder atomically, as its only writer: its path holds the old or the new one, even after a crash.

A commit writes beside the path, syncs, moves the result to the path in one step and syncs the folder. A folder swaps
names with the old folder if the system can do that. Otherwise the old folder is moved aside first, and `recover`, which
readers and writers call, moves it back if a crash came between the two moves. The next commit removes the files of a
killed commit. Names beside the path have a random part, so no file of a user has such a name. No call follows a link.

`Lock` keeps other writers away: a `filelock` lock on a file beside the path. The kernel holds it (`flock`; `LockFile`
on Windows) and frees it when the process ends, however it ends, so a leftover lock file locks nothing. Readers ignore
it. On a network mount that refuses locks, `held` is False and other writers are not kept out; `filelock`'s fallback, a
file that stays locked when its owner is killed, is disabled. https://py-filelock.readthedocs.io
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Self

from filelock import FileLock, Timeout

from protokv.errors import StateError, StateLocked, cause_of, system_error

_HINTS = {
    "free some space, or write elsewhere": (errno.ENOSPC, errno.EDQUOT),
    "create the folder first": (errno.ENOENT, errno.ENOTDIR),
    "choose a folder that you may write to": (errno.EACCES, errno.EPERM, errno.EROFS),
    "choose another name": (errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.EEXIST),
    "choose a shorter name": (errno.ENAMETOOLONG,),
    "free some memory, or raise the limit of this process (ulimit -v)": (errno.ENOMEM,),
}
_UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.ENOLCK}
_NO_LINKS = {errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}

# Errors of opening a lock file that is a link, a folder or a device.
_NOT_OURS = {errno.ELOOP, errno.EISDIR, errno.ENXIO}

# renameat2(2) of Linux: https://man7.org/linux/man-pages/man2/rename.2.html
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


# ---- replace, keep and remove whole states ----


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` create and sync a file or folder at a temporary path, then put it in place of `path`.

    `path` must not be a link. An old folder is removed once the new one is durable.

    Raises:
        OSError: it cannot be written, or a file would replace a folder, or a folder a file. The old entry stays.
    """
    recover(path)
    for stale in _find_leftovers(path, "partial|previous"):
        _remove(stale)
    aside = _hidden_name(path, "previous")
    with _temporary(path) as made:
        write(made)
        # The system refuses to move a file over a folder, and a folder over a file.
        if not (path.is_dir() and made.is_dir()):
            made.replace(path)
        elif not exchange(made, path):
            path.replace(aside)
            try:
                made.replace(path)
            finally:
                recover(path)
        sync_folder(path.parent)
    _try_to_remove(aside)


def recover(target: Path) -> None:
    """Move a folder back that an interrupted commit had moved aside.

    This does no harm to a writer between its two moves: the second move fails, and the old state stays.
    """
    if os.path.lexists(target):
        return
    # Another process may do the same; a reader that may not write here finds no state.
    with suppress(OSError):
        moved = [one for one in _find_leftovers(target, "previous") if one.is_dir() and not one.is_symlink()]
        if moved:
            max(moved, key=lambda one: one.stat().st_mtime_ns).replace(target)


def keep_as(target: Path, name: Path) -> None:
    """Give the contents of `target` the second, new name `name` in the same folder; it appears atomically.

    A file gets a hard link, a folder becomes a second folder of hard links. Both survive a replaced `target`.
    """
    with _temporary(target) as made:
        _link_all(target, made)
        made.replace(name)
        sync_folder(target.parent)


def retire(target: Path, name: Path) -> None:
    """Remove a name that `keep_as` gave to `target`; it disappears atomically."""
    with _temporary(target) as made:
        name.replace(made)
        # Without this a crash could undo the move but not the removal.
        sync_folder(target.parent)


@contextmanager
def explain_write_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an error of the system into a StateError with a hint."""
    try:
        yield
    except StateError:
        raise
    except Exception as error:
        why = error if isinstance(error, ValueError) else system_error(error)
        if why is None:
            raise
        number = errno.ENOMEM if isinstance(why, MemoryError) else getattr(why, "errno", 0)
        hint = next((hint for hint, numbers in _HINTS.items() if number in numbers), "")
        raise StateError(f"cannot write the state {os.fspath(path)}: {cause_of(why)}", hint=hint) from error


# ---- single files and folders ----


def write_file(path: Path, fill: Callable[[BinaryIO], object]) -> None:
    """Create a file, let `fill` write it, and sync it. Its mode is 0666 less the umask."""
    with path.open("xb") as file:
        fill(file)
        file.flush()
        os.fsync(file.fileno())


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


def _link_all(source: Path, target: Path) -> None:
    """Give a file a second name, and a folder a second folder of such names."""
    if source.is_dir() and not source.is_symlink():
        target.mkdir()
        for entry in sorted(source.iterdir()):
            _link_all(entry, target / entry.name)
        sync_folder(target)
        return
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS or source.is_symlink():
            raise
        with source.open("rb") as file:
            write_file(target, lambda copy: shutil.copyfileobj(file, copy))


def _find_leftovers(target: Path, kind: str) -> list[Path]:
    """Return what is there under a name of `_hidden_name`: it belongs to this state and to no other."""
    ours = re.compile(re.escape(f".{target.name}.") + rf"\d+-[0-9a-f]{{8}}\.({kind})")
    return [one for one in target.parent.iterdir() if ours.fullmatch(one.name)]


def _hidden_name(target: Path, kind: str) -> Path:
    """Return a hidden path beside `target` that nothing has: two writers never share a file."""
    return target.parent / f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.{kind}"


@contextmanager
def _temporary(target: Path) -> Iterator[Path]:
    """Yield a hidden path beside `target`; remove its file or folder at the end."""
    path = _hidden_name(target, "partial")
    try:
        yield path
    finally:
        _try_to_remove(path)


def _try_to_remove(path: Path) -> None:
    if os.path.lexists(path):
        # What cannot be removed now, the next commit removes.
        with suppress(OSError):
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


class Lock:
    """The right to write to `path`, as a context manager; entering it does not wait.

    Attributes:
        held: True while the file system holds the lock.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        target = Path(os.path.realpath(path))
        self.path = Path(path)
        self.file = target.parent / f".{target.name}.lock"
        self.held = False
        self._lock = FileLock(self.file, blocking=False, thread_local=False, fallback_to_soft=False)

    def __enter__(self) -> Self:
        """Take the lock. StateLocked if any process holds it; StateError if the lock file cannot be created."""
        with explain_write_errors(self.path):
            try:
                self._lock.acquire()
                self.held = True
            except Timeout:
                raise StateLocked(
                    f"the state {self.path} is being written by another writer",
                    hint="wait for it or write elsewhere; query and inspect read its last commit meanwhile",
                ) from None
            except OSError as error:
                if error.errno in _NOT_OURS:
                    what = f"cannot write the state {self.path}: {self.file.name} beside it is no lock file of ours"
                    raise StateError(what, hint="remove it, or write elsewhere") from error
                if error.errno not in _UNSUPPORTED:
                    raise
        return self

    def __exit__(self, *_: Any) -> None:
        """Release the lock and remove its file."""
        # Unlink while locked: filelock does not lock a file that was unlinked, so the next owner is alone. Windows
        # cannot remove an open file; there it stays. A forked child has lost the lock and removes nothing.
        if self._lock.is_locked or not self.held:
            with suppress(OSError):
                self.file.unlink()
        # The state is written; the system frees the lock at the end of the process in any case.
        with suppress(OSError):
            self._lock.release()
        self.held = False
