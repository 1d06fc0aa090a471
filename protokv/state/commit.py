"""Replace a file or folder atomically, as its only writer: its path holds the old or the new one, even after a crash.

A commit writes beside the path, syncs, moves the result to the path in one step and syncs the folder. A folder swaps
names with the old folder if the system can do that. Otherwise the old folder is moved aside first, and `recover`, which
readers and writers call, moves it back if a crash came between the two moves. The next commit removes the
files of a killed commit. Names beside the path have a random part: no file of a user has such a name.

`Lock` keeps other writers away: a `filelock` lock on a file beside the path. The kernel holds it (`flock`; `LockFile`
on Windows) and frees it when the process ends, however it ends, so a leftover lock file locks nothing. Readers ignore
it. On a network mount that refuses locks, `held` is False and other writers are not kept out; `filelock`'s fallback, a
file that stays locked when its owner is killed, is disabled. https://py-filelock.readthedocs.io
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout

import protokv.state.filesystem as filesystem
from protokv.errors import StateError, StateLocked, cause_of, system_error

_HINTS = {
    "free some space, or write elsewhere": (errno.ENOSPC, errno.EDQUOT),
    "create the folder first": (errno.ENOENT, errno.ENOTDIR),
    "choose a folder that you may write to": (errno.EACCES, errno.EPERM, errno.EROFS),
    "choose another name": (errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.EEXIST),
    "choose a shorter name": (errno.ENAMETOOLONG,),
    "free some memory, or raise the limit of this process (ulimit -v)": (errno.ENOMEM,),
}


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` create and sync a file or folder at a temporary path, then put it in place of `path`.

    `path` must not be a link. An old folder is removed once the new one is durable.

    Raises:
        OSError: it cannot be written, or a file would replace a folder, or a folder a file. The old entry stays.
    """
    recover(path)
    sweep(path)
    aside = _name_beside(path, "previous")
    with _partial(path) as made:
        write(made)
        # The system refuses to move a file over a folder, and a folder over a file.
        if not (path.is_dir() and made.is_dir()):
            filesystem.replace(made, path)
        elif not filesystem.exchange(made, path):
            filesystem.replace(path, aside)
            try:
                filesystem.replace(made, path)
            finally:
                recover(path)
        filesystem.sync_folder(path.parent)
    _discard(aside)


def recover(target: Path) -> None:
    """Move a folder back that an interrupted commit had moved aside.

    This does no harm to a writer between its two moves: the second move fails, and the old state stays.
    """
    if os.path.lexists(target):
        return
    # Another process may do the same; a reader that may not write here finds no state.
    with suppress(OSError):
        moved = [one for one in _ours_beside(target, "previous") if one.is_dir() and not one.is_symlink()]
        if moved:
            filesystem.replace(max(moved, key=lambda one: one.stat().st_mtime_ns), target)


def sweep(target: Path) -> None:
    """Remove the temporary files of killed commits to `target`, and nothing that belongs to another state."""
    for stale in _ours_beside(target, "partial|previous"):
        filesystem.remove(stale)


def _ours_beside(target: Path, kind: str) -> list[Path]:
    """Return what is there under a name of `_name_beside`."""
    ours = re.compile(re.escape(f".{target.name}.") + rf"\d+-[0-9a-f]{{8}}\.({kind})")
    return [one for one in target.parent.iterdir() if ours.fullmatch(one.name)]


def keep_as(target: Path, name: Path) -> None:
    """Give the contents of `target` the second, new name `name` in the same folder; it appears atomically.

    A file gets a hard link, a folder becomes a second folder of hard links. Both survive a replaced `target`.
    """
    with _partial(target) as made:
        _link_all(target, made)
        filesystem.replace(made, name)
        filesystem.sync_folder(target.parent)


def retire(target: Path, name: Path) -> None:
    """Remove a name that `keep_as` gave to `target`; it disappears atomically."""
    with _partial(target) as made:
        filesystem.replace(name, made)
        # Without this a crash could undo the move but not the removal.
        filesystem.sync_folder(target.parent)


def go_back(target: Path, kept: Path | None) -> Path | None:
    """Put a copy of `kept` in place of `target`, or nothing; return the new name of what was there, if anything was.

    That name comes first, so a crash loses nothing. `target` holds the old or the new contents at any time.
    """
    aside = None
    if os.path.lexists(target):
        names = (f"{target.name}.damaged" + (f"-{n}" if n > 1 else "") for n in itertools.count(1))
        aside = next(one for one in map(target.with_name, names) if not os.path.lexists(one))
    if aside is not None and kept is not None:
        keep_as(target, aside)
    if kept is not None:
        replace(target, lambda made: _link_all(kept, made))
    elif aside is not None:
        filesystem.replace(target, aside)
        filesystem.sync_folder(target.parent)
    return aside


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
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


@contextmanager
def _partial(target: Path) -> Iterator[Path]:
    """Yield a hidden temporary path beside `target`; remove its file or folder at the end."""
    path = _name_beside(target, "partial")
    try:
        yield path
    finally:
        _discard(path)


def _name_beside(target: Path, kind: str) -> Path:
    """Return a hidden path beside `target` that nothing has: two writers never share a file."""
    return target.parent / f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.{kind}"


def _discard(path: Path) -> None:
    if os.path.lexists(path):
        # The next commit removes the rest.
        with suppress(OSError):
            filesystem.remove(path)


def _link_all(source: Path, target: Path) -> None:
    if source.is_symlink() or not source.is_dir():
        filesystem.link(source, target)
        return
    filesystem.make_folder(target)
    for entry in sorted(source.iterdir()):
        _link_all(entry, target / entry.name)
    filesystem.sync_folder(target)


_UNSUPPORTED = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
# Errors of opening a lock file that is a link, a folder or a device.
_NOT_OURS = {errno.ELOOP, errno.EISDIR, errno.ENXIO}


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
        with writing(self.path):
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
