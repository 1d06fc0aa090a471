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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from protokv.errors import StateError
from protokv.snapshot.filesystem import DISK, FileSystem

_HINTS = {
    "free some space, or write elsewhere": (errno.ENOSPC, errno.EDQUOT),
    "create the folder first": (errno.ENOENT, errno.ENOTDIR),
    "choose a folder that you may write to": (errno.EACCES, errno.EPERM, errno.EROFS),
    "name a file, not a folder": (errno.EISDIR,),
    "choose a shorter name": (errno.ENAMETOOLONG,),
}

# Systems allow 255 bytes; the names made here and those of kept commits add at most so many.
_LONGEST_NAME_BYTES = 255 - 48


def replace(path: Path, write: Callable[[Path], object], fs: FileSystem = DISK) -> None:
    """Let `write` make a file or a folder at the path it is given, and put that in place of `path`, which is no link.

    `write` syncs what it makes. An old folder is removed when the new one is in place for good.

    Raises:
        OSError: It could not be written; what was at `path` before is still there.
    """
    temporary = partial_path(path)
    recover(path, fs)
    sweep(path, fs)
    try:
        write(temporary)
        if path.exists() and path.is_dir() != temporary.is_dir():
            number = errno.EISDIR if path.is_dir() else errno.ENOTDIR
            raise OSError(number, os.strerror(number))
        if not path.is_dir():
            fs.replace(temporary, path)
        elif not fs.exchange(temporary, path):
            # Two acts: `recover` undoes the first if the second never comes.
            fs.replace(path, _aside(path))
            fs.replace(temporary, path)
    except BaseException:
        # The error that led here says more than one of the removal; the next commit removes what is left.
        with suppress(OSError):
            recover(path, fs)
            fs.remove(temporary)
        raise
    fs.sync_folder(path.parent)
    if path.is_dir():
        # The new one is in place; what of the old cannot be removed now is removed by the next commit.
        with suppress(OSError):
            sweep(path, fs)


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
    with writing(path):
        target = Path(os.path.realpath(path))
        there = target.parent.is_dir()
    what, hint = f"cannot write the state {path}", "Choose another folder."
    if not there:
        raise StateError(f"{what}: there is no folder {Path(path).parent}", hint="Make it first.")
    if not os.access(target.parent, os.W_OK):
        raise StateError(f"{what}: {Path(path).parent} is read-only", hint=hint)
    if len(os.fsencode(target.name)) > _LONGEST_NAME_BYTES:
        raise StateError(f"{what}: its name takes more than {_LONGEST_NAME_BYTES} bytes", hint="choose a shorter name")
    return target


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns what the system refuses into the error of a state that cannot be written, and what to do about it."""
    try:
        yield
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        hint = next((hint for hint, numbers in _HINTS.items() if getattr(error, "errno", 0) in numbers), "")
        raise StateError(f"cannot write the state {os.fspath(path)}: {why}", hint=hint) from error
