"""Replace a file or folder atomically, as its only writer: its path holds the old or the new one,
even after a crash.

A commit writes `.NAME.partial` beside the path, syncs it and puts it in place in one step; then it
syncs the folder. An old folder is moved to `.NAME.previous` first, where readers find it;
`recover_state`, which writers call, moves it back if a crash came between the two. The next commit
of the state removes what a killed one has left.

`lock` keeps other writers away by `filelock`. The kernel frees the lock when the process ends,
however it ends, so a leftover lock file locks nothing. Readers ignore it.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from protokv import errors
from protokv.errors import (
    StateCorrupt,
    StateError,
    StateLocked,
    StateMismatch,
    StateNotFound,
    escape_text,
)

StatePath = str | os.PathLike[str]

_NO_STATE = "the file is damaged, or is not a state of protokv"
_HINTS = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space, or write elsewhere"),
    **dict.fromkeys((errno.EACCES, errno.EROFS), "choose a folder that you may write to"),
    **dict.fromkeys(
        (errno.EEXIST, errno.ENOTDIR), "a part of its path is a file: choose another folder"
    ),
    errno.ENAMETOOLONG: "choose a shorter name",
}
_UNSUPPORTED = {
    errno.EINVAL,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.EBADF,
    errno.ENOLCK,
}


def replace_state(path: Path, write: Callable[[Path], object], kept: Path | None = None) -> None:
    """Let `write` create and sync a file or folder at a temporary path, then put it in place of
    `path`, with its mode and, where one may, its owner.

    The old entry gets the name `kept`, or is removed. OSError: it stays, unless only its new name
    failed.
    """
    recover_state(path)
    made = _hidden(path, "partial")
    aside = _hidden(path, "previous")
    remove_entry(made)
    remove_entry(aside)
    try:
        write(made)
        _copy_permissions(path, made)
        if path.is_dir():
            path.replace(aside)
            made.replace(path)
            if kept is not None:
                aside.replace(kept)
        else:
            if kept is not None:
                try:
                    os.link(path, kept)
                except OSError:  # a file system without hard links
                    shutil.copyfile(path, aside)
                    aside.replace(kept)
            made.replace(path)
        sync_folder(path.parent)
    finally:
        recover_state(path)
        # The next commit removes the files that cannot be removed now.
        with suppress(OSError):
            remove_entry(made)
    with suppress(OSError):
        remove_entry(aside)


def _copy_permissions(path: Path, made: Path) -> None:
    """Give what was made the mode of the old entry, and its owner and group where one may."""
    if os.name == "nt" or not os.path.lexists(path):
        return
    there = path.stat()
    inside = sorted(made.rglob("*")) if made.is_dir() else ()
    for one in (made, *inside):
        for uid, gid in ((there.st_uid, -1), (-1, there.st_gid)):
            with suppress(OSError):
                os.chown(one, uid, gid)
        is_file_inside = made.is_dir() and one.is_file()
        one.chmod(stat.S_IMODE(there.st_mode) & (0o666 if is_file_inside else 0o7777))


def recover_state(path: Path) -> None:
    """Move a state back that an interrupted commit had moved aside. Only its writer may do that."""
    if not os.path.lexists(path):
        with suppress(FileNotFoundError):
            _hidden(path, "previous").replace(path)


def find_state_place(path: Path) -> Path:
    """Return the path to read a state from: while a commit replaces a folder, the old one lies
    aside.
    """
    aside = _hidden(path, "previous")
    return aside if not os.path.lexists(path) and os.path.lexists(aside) else path


def remove_kept_commit(path: Path, kept: Path) -> None:
    """Remove a kept state of the one at `path`; it disappears atomically."""
    made = _hidden(path, "partial")
    remove_entry(made)
    remove_entry(kept.replace(made))


def write_state_file(path: Path, fill: Callable[[BinaryIO], object]) -> None:
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


def _hidden(target: Path, kind: str) -> Path:
    return target.with_name(f".{target.name}.{kind}")


def remove_entry(path: Path) -> None:
    """Remove a file, a link or a whole folder, or nothing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def lock(path: StatePath) -> Iterator[bool]:
    """Hold the right to write to `path`, without waiting for it. StateLocked if any process holds
    it; StateError.

    Yield True if other writers are kept out, and False on a network mount that refuses locks.
    """
    file = _hidden(Path(os.path.realpath(path)), "lock")
    found = FileLock(file, blocking=False, thread_local=False, fallback_to_soft=False)
    held = True
    with explain_write_errors(path):
        try:
            found.acquire()
        except Timeout:
            raise StateLocked(
                f"the state {os.fspath(path)} is being written by another writer",
                hint="wait for it or write elsewhere; query and inspect read its last commit "
                "meanwhile",
            ) from None
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            held = False
    try:
        yield held
    finally:
        # The file goes while it is locked: filelock locks no file without a name, so the next owner
        # is alone. A forked child has no lock and removes nothing.
        with suppress(OSError):
            if found.is_locked or not held:
                file.unlink()
            found.release()


def is_locked(path: StatePath) -> bool:
    """Return True while a process holds the right to write to `path`, as far as this can be
    known.
    """
    # Nothing is created: a writer removes its file, and a killed one leaves it behind, unlocked.
    try:
        import fcntl

        with _hidden(Path(os.path.realpath(path)), "lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (ImportError, OSError):
        return False
    return False


@contextmanager
def explain_write_errors(path: StatePath) -> Iterator[None]:
    """Turn an error of the system into a StateError with a hint."""
    try:
        yield
    except StateError:
        raise
    except Exception as error:
        why = error if isinstance(error, ValueError) else errors.find_system_error(error)
        if why is None:
            raise
        hint = _HINTS.get(getattr(why, "errno", None) or 0, "")
        raise StateError(
            f"cannot write the state {path}: {errors.format_os_error(why)}", hint=hint
        ) from error


@contextmanager
def explain_read_errors(path: StatePath) -> Iterator[None]:
    """Turn errors of reading a state into a StateError that names its path; those of a library are
    StateCorrupt.
    """
    where = os.fspath(path)
    try:
        yield
    except (StateCorrupt, StateMismatch) as error:
        raise type(error)(f"{where}: {error.message}", hint=error.hint or _NO_STATE) from error
    except errors.ProtoKVError:
        raise
    except Exception as error:
        # Bind the cause to no variable here: the traceback would keep the reader's session alive.
        raise _explain_read_error(where, error) from error


def _explain_read_error(where: str, error: Exception) -> StateError:
    why = errors.find_system_error(error)
    # Python refuses to go to a place before the beginning of a file by EINVAL.
    if why is None or getattr(why, "errno", None) == errno.EINVAL:
        return StateCorrupt(
            f"{where}: it cannot be read as a state ({escape_text(error)})", hint=_NO_STATE
        )
    if getattr(why, "errno", None) in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
        return make_state_not_found(where)
    return StateError(f"cannot read the state {where}: {errors.format_os_error(why)}")


def make_state_not_found(path: StatePath) -> StateNotFound:
    """Return the error of a state that does not exist."""
    return StateNotFound(
        f"no state at {os.fspath(path)}",
        hint="check the spelling; `protokv ingest VIDEO -o STATE` makes one",
    )
