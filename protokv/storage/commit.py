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
    """Let `write` make a file or a folder at the path it is given, and put that in place of `path`, which is no link.

    `write` syncs what it makes. An old folder is removed when the new one is in place for good.

    Raises:
        OSError: It could not be written, or a file would take the place of a folder or the other way round; what was
            at `path` before is still there.
    """
    recover(path)
    sweep(path)
    with _partial(path) as made:
        write(made)
        # Between a file and a folder the system refuses the move.
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
    # The new one is in place; what of the old cannot be removed now is removed by the next commit.
    _discard(_aside(path))


def recover(target: Path) -> None:
    """Move a folder back that a commit without `exchange` had moved aside when it was cut off.

    Beside a writer that is between its two moves this is no harm: its second one fails, and the old state stands.
    """
    aside = _aside(target)
    if not os.path.lexists(target) and aside.is_dir() and not aside.is_symlink():
        # Somebody else may do the same; a reader that may not write here finds no state.
        with suppress(OSError):
            filesystem.replace(aside, target)


def sweep(target: Path) -> None:
    """Remove what a killed commit to `target` left behind, and nothing of another state's."""
    ours = re.compile(re.escape(f".{target.name}.") + r"\d+-[0-9a-f]{8}\.partial")
    for stale in target.parent.iterdir():
        if ours.fullmatch(stale.name):
            filesystem.remove(stale)


def keep_as(target: Path, name: Path) -> None:
    """Let `name`, in the same folder and new, hold what `target` holds now, and go on when `target` is replaced.

    A file gets a second name; a folder becomes a second folder of second names, which is enough where files in it are
    replaced and never written to. `name` appears whole or not at all.
    """
    with _partial(target) as made:
        _link_all(target, made)
        filesystem.replace(made, name)
        filesystem.sync_folder(target.parent)


def retire(target: Path, name: Path) -> None:
    """Remove what `keep_as` made for `target`; it disappears in one act."""
    with _partial(target) as made:
        filesystem.replace(name, made)
        # Or a crash may undo the move and not the removal.
        filesystem.sync_folder(target.parent)


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns what the system refuses into the error of a state that cannot be written, and what to do about it."""
    try:
        yield
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        hint = next((hint for hint, numbers in _HINTS.items() if getattr(error, "errno", 0) in numbers), "")
        raise StateError(f"cannot write the state {os.fspath(path)}: {why}", hint=hint) from error


@contextmanager
def _partial(target: Path) -> Iterator[Path]:
    """A hidden name beside `target` for what is not yet or no longer there: what has it at the end is removed."""
    # With a name of its own: two writers never write into the same file.
    path = target.parent / f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.partial"
    try:
        yield path
    finally:
        _discard(path)


def _aside(target: Path) -> Path:
    return target.parent / f".{target.name}.previous"


def _discard(path: Path) -> None:
    if os.path.lexists(path):
        # The next commit removes what is left.
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
