"""Puts a file or a folder in place so that its path holds the old or the new one whole, whatever happens in between.

What is new is made beside the path and synced, moved to it in one act, and the folder that holds both is synced. A
folder changes places with the old one where the system can do that; elsewhere the old one is moved aside first, and
`recover`, which readers and writers call, moves it back if a crash came between the two moves. `keep_as` gives what
stands there a second name without copying it, and `retire` takes one away. What an earlier, killed commit left behind
is removed by the next. Knows nothing of what is written.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from protokv.errors import StateError
from protokv.snapshot.filesystem import DISK, FileSystem

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

# Systems allow 255 bytes; the names made here and those of kept commits add at most so many.
_LONGEST_NAME_BYTES = 255 - 48


def replace_file(path: str | os.PathLike[str], write: Callable[[Path], int], fs: FileSystem = DISK) -> None:
    """Let `write` make a file at the path it is given, and put that in place of `path`.

    `write` syncs its file and returns the bytes that it must have. A link at `path` stays a link, and what it
    points to is replaced.

    Raises:
        StateError: It could not be written; what was at `path` before is still there.
    """

    def make(temporary: Path) -> None:
        expected = write(temporary)
        found = fs.size(temporary)
        if found != expected:
            raise OSError(errno.EIO, f"{found} of {expected} bytes were written")

    def put(temporary: Path, target: Path) -> None:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        fs.replace(temporary, target)

    _replace(path, make, put, fs)


def replace_folder(path: str | os.PathLike[str], write: Callable[[Path], None], fs: FileSystem = DISK) -> None:
    """Let `write` make a folder at the path it is given, and put that in place of `path`; as `replace_file`.

    `write` syncs its files and the folder. The old folder is removed when the new one is in place for good.
    """
    _replace(path, write, lambda temporary, target: _swap(temporary, target, fs), fs)
    target = Path(os.path.realpath(path))
    # The new one is in place; what cannot be removed now is removed by the next commit.
    with suppress(OSError):
        fs.remove(_aside(target))
        sweep(target, fs)


def _replace(
    path: str | os.PathLike[str],
    make: Callable[[Path], None],
    put: Callable[[Path, Path], None],
    fs: FileSystem,
) -> None:
    try:
        target = Path(os.path.realpath(path))
        temporary = partial_path(target)
        recover(target, fs)
        sweep(target, fs)
    except (OSError, ValueError) as error:
        raise refused(path, error) from error
    try:
        make(temporary)
        put(temporary, target)
    except BaseException as error:
        # The error that led here says more than one of the removal; the next commit removes what is left.
        with suppress(OSError):
            fs.remove(temporary)
        if isinstance(error, OSError):
            raise refused(path, error) from error
        raise
    try:
        fs.sync_folder(target.parent)
    except OSError as error:
        raise refused(path, error) from error


def _swap(temporary: Path, target: Path, fs: FileSystem) -> None:
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    if not target.exists():
        fs.replace(temporary, target)
    elif not fs.exchange(temporary, target):
        # Two acts: `recover` undoes the first if the second never comes.
        fs.replace(target, _aside(target))
        try:
            fs.replace(temporary, target)
        except OSError:
            recover(target, fs)
            raise


def recover(target: Path, fs: FileSystem = DISK) -> None:
    """Move a folder back that a commit without `exchange` had moved aside when it was cut off.

    Beside a writer that is between its two moves this is no harm: its second one fails, and the old state stands.
    """
    aside = _aside(target)
    if not os.path.lexists(target) and aside.is_dir() and not aside.is_symlink():
        # Somebody else may do the same; a reader that may not write here finds no state.
        with suppress(OSError):
            fs.replace(aside, target)


def _aside(target: Path) -> Path:
    return target.parent / f".{target.name}.previous"


def partial_path(target: Path) -> Path:
    """A hidden name beside `target` for what is not yet or no longer there; `sweep` removes what has such a name."""
    # With a name of its own: two writers never write into the same file.
    return target.parent / f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.partial"


def sweep(target: Path, fs: FileSystem = DISK) -> None:
    """Remove what a killed commit to `target` left behind, and nothing of another state's."""
    ours = re.compile(re.escape(f".{target.name}.") + r"\d+-[0-9a-f]{8}\.partial")
    for stale in fs.leftovers(target.parent, f".{target.name}."):
        if ours.fullmatch(stale.name):
            fs.remove(stale)
    aside = _aside(target)
    if os.path.lexists(target) and os.path.lexists(aside):
        fs.remove(aside)


def keep_as(target: Path, name: Path, fs: FileSystem = DISK) -> None:
    """Let `name`, in the same folder, hold what `target` holds now, and go on holding it when `target` is replaced.

    A file gets a second name; a folder becomes a second folder of second names, which is enough where files in it are
    replaced and never written to. `name` appears whole or not at all; what it held before is lost.
    """
    temporary = partial_path(target)
    try:
        _link_all(target, temporary, fs)
        if name.is_dir():
            retire(target, name, fs)
        fs.replace(temporary, name)
    except OSError:
        with suppress(OSError):
            fs.remove(temporary)
        raise
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
    if source.is_symlink() or not source.is_dir():
        fs.link(source, target)
        return
    fs.make_folder(target)
    for entry in sorted(source.iterdir()):
        _link_all(entry, target / entry.name, fs)
    fs.sync_folder(target)


def check_place(path: str | os.PathLike[str]) -> Path:
    """Whether something can be made beside `path`; returns the path itself, links resolved.

    Raises:
        StateError: The folder is missing or may not be written to, or the name is too long.
    """
    try:
        target = Path(os.path.realpath(path))
        there = target.parent.is_dir()
    except (OSError, ValueError) as error:
        raise refused(path, error) from error
    if not there:
        folder = Path(path).parent
        raise StateError(f"cannot write the state {path}: there is no folder {folder}", hint="Make it first.")
    if not os.access(target.parent, os.W_OK):
        raise StateError(
            f"cannot write the state {path}: {Path(path).parent} is read-only", hint="Choose another folder."
        )
    if len(os.fsencode(target.name)) > _LONGEST_NAME_BYTES:
        raise StateError(
            f"cannot write the state {path}: its name takes more than {_LONGEST_NAME_BYTES} bytes",
            hint="choose a shorter name",
        )
    return target


def refused(path: str | os.PathLike[str], error: OSError | ValueError) -> StateError:
    """The error of a state that cannot be written, and what to do about it."""
    number = getattr(error, "errno", None)
    why = getattr(error, "strerror", None) or str(error)
    return StateError(f"cannot write the state {os.fspath(path)}: {why}", hint=_HINTS.get(number or 0, ""))
