"""One writer a state: an advisory lock on a file beside it, which the kernel takes back when its process ends.

The lock is never stale: what decides is the kernel's record of it, not the file, which only says who holds it and may
be left behind by a killed process. Readers do not look at it. It belongs to a process, not to its children, so a
forked helper cannot keep it alive. Network file systems: it holds between machines where the server keeps locks (NFS 4,
NFS 3 with lockd, SMB); where a mount refuses them, `held` is False and nobody is kept out. Knows nothing of what
is written.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import stat
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from protokv.errors import StateError, StateLocked
from protokv.snapshot.text import shown

_UNSUPPORTED = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_TAKEN = {errno.EACCES, errno.EAGAIN, errno.EDEADLK}
# What opening a link, a folder or a device in the place of the lock file ends in.
_NOT_OURS = {errno.ELOOP, errno.EISDIR, errno.ENXIO}

_FLAGS = os.O_RDWR | os.O_CREAT | sum(getattr(os, name, 0) for name in ("O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK"))

# The kernel keeps processes apart, not the threads of one; and to close a second descriptor of a file would drop the
# process's lock on it.
_OURS: set[tuple[int, Path]] = set()
_GUARD = threading.Lock()


class Lock:
    """The right to write to `path`, as a context manager; entering it does not wait.

    Attributes:
        held: whether the file system keeps the lock; False as well before and after.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        target = Path(os.path.realpath(path))
        self.path = Path(path)
        self.file = target.parent / f".{target.name}.lock"
        self.held = False
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        """Take it.

        Raises:
            StateLocked: another process, or another writer in this one, holds it; the message says which.
            StateError: the file beside the state cannot be made.
        """
        with _GUARD:
            if (os.getpid(), self.file) in _OURS:
                raise self._refused("another writer of this process")
            try:
                self._descriptor = self._locked()
            except OSError as error:
                why = error.strerror or str(error)
                if error.errno in _NOT_OURS:
                    why = f"{self.file.name} beside it is no lock file of ours"
                raise StateError(
                    f"cannot lock the state {self.path}: {why}",
                    hint="free some space" if error.errno == errno.ENOSPC else "choose a folder that you may write to",
                ) from error
            _OURS.add((os.getpid(), self.file))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give it back and remove the file."""
        with _GUARD:
            _OURS.discard((os.getpid(), self.file))
            if self._descriptor is None:
                return
            # While it is still locked: whoever has it open sees that it is gone and makes a new one. Windows removes no
            # open file; there it stays and does no harm.
            with contextlib.suppress(OSError):
                self.file.unlink()
            os.close(self._descriptor)
            self._descriptor, self.held = None, False

    def _locked(self) -> int:
        while True:
            number = os.open(self.file, _FLAGS, 0o666)
            try:
                status = os.fstat(number)
                # A second name of somebody's file, or no file: it would be written over.
                if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                self.held = _lock(number)
                if _is_at(number, self.file):
                    _describe(number)
                    return number
            except OSError as error:
                holder = _holder(number)
                os.close(number)
                if error.errno in _TAKEN:
                    raise self._refused(holder) from None
                raise
            # Its last owner removed it between our opening and our locking it.
            os.close(number)

    def _refused(self, holder: str) -> StateLocked:
        return StateLocked(
            f"the state {self.path} is being written by {holder}",
            hint="wait for it or write elsewhere; query and inspect read its last commit meanwhile",
        )


def _lock(number: int) -> bool:
    """Lock an open file for this process, or raise OSError at once; False where the file system has no locks."""
    try:
        if sys.platform == "win32":
            import msvcrt

            # Windows keeps others from reading what is locked, so this is a byte behind the text.
            os.lseek(number, 1 << 20, os.SEEK_SET)
            msvcrt.locking(number, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.lockf(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return False
        raise
    return True


def _is_at(number: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(number), path.stat())
    except FileNotFoundError:
        return False


def _describe(number: int) -> None:
    """Write who holds the lock, for the message of whoever is refused."""
    started = datetime.now(UTC).isoformat(timespec="seconds")
    # On a full disk the lock holds without saying whose it is.
    with contextlib.suppress(OSError):
        os.ftruncate(number, 0)
        os.lseek(number, 0, os.SEEK_SET)
        os.write(number, json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "started": started}).encode())


def _holder(number: int) -> str:
    try:
        os.lseek(number, 0, os.SEEK_SET)
        found = json.loads(os.read(number, 1024))
        return f"process {shown(found['pid'])} on {shown(found['host'])} since {shown(found['started'])}"
    except (OSError, ValueError, KeyError, TypeError):
        # It was taken this moment, and is not described yet.
        return "another process"
