"""Exit codes: part of the command line's contract, and the code of each error of the library."""

from __future__ import annotations

from enum import IntEnum

from protokv import errors


class Exit(IntEnum):
    """The exit code of the process.

    Attributes:
        DONE: it did what it was told to do.
        FAILURE: it failed. Also: two states that `inspect` compares differ.
        USAGE: an option, a setting or a password is wrong.
        PARTIAL: the state is written, but video or subtitles are damaged, or one of several failed.
        NOT_FOUND: there is no such video, state or model.
        LOCKED: another process is writing the state, or has written it meanwhile.
        MISMATCH: the state does not fit the model, the memory or this version.
        CORRUPT: the state is damaged, or is no state.
        HUNG_UP: the terminal was closed; the state is committed.
        INTERRUPTED: Ctrl-C; the state is committed.
        TERMINATED: `kill`; the state is committed.
    """

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
    (errors.ModelNotFound, Exit.NOT_FOUND),
    (errors.SourceNotFound, Exit.NOT_FOUND),
    (errors.StateNotFound, Exit.NOT_FOUND),
    (errors.StateLocked, Exit.LOCKED),
    (errors.StateMismatch, Exit.MISMATCH),
    (errors.StateCorrupt, Exit.CORRUPT),
)


def find_exit_code(error: errors.ProtoKVError) -> Exit:
    """Return the exit code for an error of the library."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), Exit.FAILURE)
