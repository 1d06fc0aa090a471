"""One writer a state: the lock of the `filelock` library on a file beside it.

The lock is the kernel's (`flock`; `LockFile` on Windows) and ends with its process, however that ends: a file that a
killed process left behind locks nothing, and a forked helper keeps nothing alive. The library follows no link and
writes nothing to the file. Readers do not look at it. Network file systems: it holds between machines where the server
keeps locks; where a mount refuses them, `held` is False and nobody is kept out. The library's own way around that, a
file that stays locked when its owner is killed, is not taken. Knows nothing of what is written.
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
# What opening a link, a folder or a device in the place of the lock file ends in.
_NOT_OURS = {errno.ELOOP, errno.EISDIR, errno.ENXIO}


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
        self._lock = FileLock(self.file, blocking=False, thread_local=False, fallback_to_soft=False)

    def __enter__(self) -> Self:
        """Take it. StateLocked if another holds it, in this process or not; StateError if the file cannot be made."""
        with writing(self.path):
            try:
                # The library would make a folder that is not there.
                self.file.parent.stat()
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
        """Give it back and remove the file."""
        # While it is still locked: the library takes no lock on a file that is gone by then, so nobody who has it open
        # is let in beside the next one. Windows removes no open file; there it stays and does no harm.
        # A forked child, which has lost the lock, removes nothing.
        if self._lock.is_locked or not self.held:
            with suppress(OSError):
                self.file.unlink()
        self._lock.release()
        self.held = False
