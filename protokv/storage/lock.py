"""One writer per state: a `filelock` lock on a file beside it.

The kernel holds the lock (`flock`; `LockFile` on Windows) and frees it when the process ends, however it ends, so a
leftover lock file locks nothing. Readers ignore the lock. On a network mount that refuses locks, `held` is False and
other writers are not kept out; `filelock`'s fallback, a file that stays locked when its owner is killed, is disabled.
https://py-filelock.readthedocs.io
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout

from protokv.errors import StateError, StateLocked
from protokv.storage.commit import writing

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
        self._lock.release()
        self.held = False
