"""Exit codes: part of the command line's contract, and the code of each error of the library."""

from __future__ import annotations

from enum import IntEnum

from protokv import errors


class Exit(IntEnum):
    """The exit code of the process."""

    DONE = 0
    FAILURE = 1
    USAGE = 2
    PARTIAL = 3
    NOT_FOUND = 10
    LOCKED = 11
    MISMATCH = 12
    CORRUPT = 13
    HUNG_UP = 129
    INTERRUPTED = 130
    TERMINATED = 143


_CODES: tuple[tuple[type[errors.ProtoKVError], Exit], ...] = (
    (errors.ConfigError, Exit.USAGE),
    (errors.UnknownForm, Exit.USAGE),
    (errors.SourceDenied, Exit.USAGE),
    (errors.SourceNotFound, Exit.NOT_FOUND),
    (errors.StateNotFound, Exit.NOT_FOUND),
    (errors.StateLocked, Exit.LOCKED),
    (errors.StateMismatch, Exit.MISMATCH),
    (errors.StateCorrupt, Exit.CORRUPT),
)


def exit_code(error: errors.ProtoKVError) -> Exit:
    """Return the exit code for an error of the library."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), Exit.FAILURE)
