"""What all forms in a file system share: a lock beside the state, and earlier commits under names of their own.

A form adds how one state is put in place and read. Knows nothing of what is in the files.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from protokv.errors import StateError
from protokv.snapshot import history
from protokv.snapshot.commit import check_place
from protokv.snapshot.document import not_found, unreadable
from protokv.snapshot.filesystem import DISK, FileSystem
from protokv.snapshot.formats.base import Committer, Form, StatePath
from protokv.snapshot.lock import Lock
from protokv.snapshot.schema import State


class LocalForm(Form):
    """A form in the file system.

    Attributes:
        suffix: what its paths end in.
        fs: the calls that its commits make.
    """

    suffix: ClassVar[str]

    def __init__(self, fs: FileSystem = DISK) -> None:
        self.fs = fs

    @abstractmethod
    def replace(self, state: State, path: StatePath) -> None:
        """Put a state in place, durably and in one act, without a lock; StateError if it cannot be written."""

    @abstractmethod
    def read(self, path: StatePath, *, verify: bool = True) -> State:
        """Read the state at a path; raises as `load`."""

    def committer(self, path: StatePath, keep: int | None = None) -> LocalCommitter:
        """The right to write to `path`, not yet taken."""
        return LocalCommitter(self, path, keep)

    def load(self, path: StatePath, *, verify: bool = True, at_s: float | None = None) -> State:
        """Read a state, or the newest commit that is not after `at_s`."""
        if at_s is None:
            return self.read(path, verify=verify)
        return history.load_at(self, path, at_s, verify=verify)

    def moments(self, path: StatePath) -> list[float]:
        """Stream times of the kept commits and of the current one, ascending."""
        return [time_s for time_s, _ in history.moments(self, path)]


class FileForm(LocalForm):
    """A form that is one file."""

    def check_target(self, path: StatePath) -> None:
        """Whether a file could be put there; what a link points to is what is replaced."""
        target = check_place(path)
        if target.is_dir():
            raise StateError(f"cannot write the state {path}: it is a folder", hint="Choose another name.")

    def stored_bytes(self, path: StatePath) -> int:
        """Bytes of the file."""
        try:
            return Path(path).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            raise not_found(path) from None
        except (OSError, ValueError) as error:
            raise unreadable(path, error) from error


class LocalCommitter(Committer):
    """Holds the lock, and keeps earlier commits where asked to."""

    def __init__(self, form: LocalForm, path: StatePath, keep: int | None) -> None:
        self._form, self._path, self._keep = form, path, keep
        self._lock = Lock(path)

    def __enter__(self) -> Self:
        """Take the lock."""
        self._form.check_target(self._path)
        self._lock.__enter__()
        self.locked = self._lock.held
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the lock back."""
        self.locked = False
        self._lock.__exit__(kind, error, trace)

    def commit(self, state: State) -> int:
        """Put a state in place; returns its bytes there."""
        history.commit(self._form, state, Path(os.fspath(self._path)), self._keep)
        return self._form.stored_bytes(self._path)
