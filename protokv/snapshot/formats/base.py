"""What a form of a state must be able to do, wherever it keeps the state.

A form is chosen by the path (`protokv.snapshot.api`). How writers are kept apart and how earlier commits
are kept is the form's own affair: files have a lock beside them and second names (`local`), a repository of an object
store has transactions and snapshots. Knows nothing of models, memories and streams.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from protokv.snapshot.schema import Header, State

StatePath = str | os.PathLike[str]

# Kept commits are named to the millisecond; who asks for the time in a name means that commit.
ROUNDING_S = 5e-4


class Committer(ABC):
    """The right to write to one path, as a context manager.

    Attributes:
        locked: whether a second writer is refused. True only between `__enter__` and `__exit__`, and False there too
            where nothing can keep others out.
    """

    locked: bool = False

    @abstractmethod
    def __enter__(self) -> Self:
        """Take it, without waiting.

        Raises:
            StateError: a state could not be written there.
            StateLocked: somebody else writes it.
        """

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give it back."""

    @abstractmethod
    def commit(self, state: State) -> int:
        """Put a state in place in one act; it is durable when this returns. Called by one thread at a time.

        Returns:
            The bytes that the state takes where it is kept, as `Form.stored_bytes`.

        Raises:
            StateLocked: somebody else has committed since this was entered (or since its own last commit).
            StateError: It cannot be written. In both cases what was there before still is.
        """


class Form(ABC):
    """One form of a state. A path holds the old or the new state whole at any time.

    Every method raises `StateError` or one of its kinds and nothing else for whatever is at the path, be it missing
    (`StateNotFound`), damaged or hostile (`StateCorrupt`, naming the tensor or field where it can), newer than this
    version reads (`StateMismatch`), or out of reach. Nothing is allocated because the data claims a size.
    """

    @abstractmethod
    def check_target(self, path: StatePath) -> None:
        """Whether a state could be written to `path`: asked before hours of work, not after them.

        Raises:
            StateError: The place is missing, may not be written to, or holds something that is no state.
        """

    @abstractmethod
    def committer(self, path: StatePath, keep: int | None = None) -> Committer:
        """The right to write to `path`, not yet taken; nothing is touched before it is entered.

        Args:
            path: where the state goes.
            keep: how many commits to keep, the current one included and at least 1; where None, none is kept, and none
                that is there is removed.
        """

    def save(self, state: State, path: StatePath) -> None:
        """Write a state once, in a lock of its own.

        Raises:
            StateError, StateLocked: as `Committer`; what was there before still is.
        """
        with self.committer(path) as committer:
            committer.commit(state)

    @abstractmethod
    def load(self, path: StatePath, *, verify: bool = True, at_s: float | None = None) -> State:
        """Read a state, tensors contiguous and on the CPU, in memory of their own.

        Args:
            path: where the state is.
            verify: check the digest of every tensor; the header's is checked in any case.
            at_s: take the newest commit that is not after this stream time (plus `ROUNDING_S`) instead of the current
                one; of the kept ones only those that are earlier moments of the same stream (`history.is_before`).

        Raises:
            StateNotFound: Nothing is there, or all of it is after `at_s`; the message lists the times that there are.
        """

    @abstractmethod
    def read_header(self, path: StatePath) -> Header:
        """Read and verify the header of the current commit alone."""

    @abstractmethod
    def stored_bytes(self, path: StatePath) -> int:
        """Bytes that the current commit takes where it is kept; kept commits are not counted."""

    @abstractmethod
    def moments(self, path: StatePath) -> list[float]:
        """Stream times of the commits that `load(at_s=)` chooses from, ascending; the current one is the last.

        Raises:
            StateNotFound: Nothing is there.
        """
