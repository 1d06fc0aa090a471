"""Replace a file or folder atomically: its path holds the old or the new one whole, even after a crash.

A commit writes beside the path, syncs, moves the result to the path in one step and syncs the folder. A folder swaps
names with the old folder if the system can do that. Otherwise the old folder is moved aside first, and `recover`, which
readers and writers call, moves it back if a crash came between the two moves. The next commit removes the
files of a killed commit.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import protokv.storage.filesystem as filesystem
from protokv.errors import StateError

_HINTS = {
    "free some space, or write elsewhere": (errno.ENOSPC, errno.EDQUOT),
    "create the folder first": (errno.ENOENT, errno.ENOTDIR),
    "choose a folder that you may write to": (errno.EACCES, errno.EPERM, errno.EROFS),
    "choose another name": (errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.EEXIST),
    "choose a shorter name": (errno.ENAMETOOLONG,),
}


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` create and sync a file or folder at a temporary path, then put it in place of `path`.

    `path` must not be a link. An old folder is removed once the new one is durable.

    Raises:
        OSError: it cannot be written, or a file would replace a folder, or a folder a file. The old entry stays.
    """
    recover(path)
    sweep(path)
    with _partial(path) as made:
        write(made)
        # The system refuses to move a file over a folder, and a folder over a file.
        if not (path.is_dir() and made.is_dir()):
            filesystem.replace(made, path)
        elif not filesystem.exchange(made, path):
            _discard(_aside(path))
            filesystem.replace(path, _aside(path))
            try:
                filesystem.replace(made, path)
            finally:
                recover(path)
        filesystem.sync_folder(path.parent)
    _discard(_aside(path))


def recover(target: Path) -> None:
    """Move a folder back that an interrupted commit had moved aside.

    This does no harm to a writer between its two moves: the second move fails, and the old state stays.
    """
    aside = _aside(target)
    if not os.path.lexists(target) and aside.is_dir() and not aside.is_symlink():
        # Another process may do the same; a reader that may not write here finds no state.
        with suppress(OSError):
            filesystem.replace(aside, target)


def sweep(target: Path) -> None:
    """Remove the temporary files of killed commits to `target`, and nothing that belongs to another state."""
    ours = re.compile(re.escape(f".{target.name}.") + r"\d+-[0-9a-f]{8}\.partial")
    for stale in target.parent.iterdir():
        if ours.fullmatch(stale.name):
            filesystem.remove(stale)


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


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an error of the system into a StateError with a hint."""
    try:
        yield
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        hint = next((hint for hint, numbers in _HINTS.items() if getattr(error, "errno", 0) in numbers), "")
        raise StateError(f"cannot write the state {os.fspath(path)}: {why}", hint=hint) from error


@contextmanager
def _partial(target: Path) -> Iterator[Path]:
    """Yield a hidden temporary path beside `target`; remove its file or folder at the end."""
    # The name is unique, so two writers never share a file.
    path = target.parent / f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.partial"
    try:
        yield path
    finally:
        _discard(path)


def _aside(target: Path) -> Path:
    return target.parent / f".{target.name}.previous"


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
