"""Exit codes: part of the command line's contract, and the code of each error of the library."""

from __future__ import annotations

from enum import IntEnum

from protokv import errors


class ExitCode(IntEnum):
    """The exit code of the process."""

    DONE = 0  # it did what it was told to do
    FAILURE = 1  # it failed; also: two states that `inspect` compares differ
    USAGE = 2  # an option, a setting or a password is wrong
    PARTIAL = 3  # the state is written, but video or words are damaged, or one of several failed
    NOT_FOUND = 10  # there is no such video, state or model
    LOCKED = 11  # another process is writing the state, or has written it meanwhile
    MISMATCH = 12  # the state does not fit the model, the memory or this version
    CORRUPT = 13  # the state is damaged, or is no state
    HUNG_UP = 129  # the terminal was closed; the state is committed
    INTERRUPTED = 130  # Ctrl-C; the state is committed
    TERMINATED = 143  # `kill`; the state is committed


_CODES: tuple[tuple[tuple[type[errors.ProtoKVError], ...], ExitCode], ...] = (
    ((errors.ConfigError, errors.UnknownForm, errors.SourceDenied), ExitCode.USAGE),
    ((errors.ModelNotFound, errors.SourceNotFound, errors.StateNotFound), ExitCode.NOT_FOUND),
    ((errors.StateLocked,), ExitCode.LOCKED),
    ((errors.StateMismatch,), ExitCode.MISMATCH),
    ((errors.StateCorrupt,), ExitCode.CORRUPT),
)


def find_exit_code(error: errors.ProtoKVError) -> ExitCode:
    """Return the exit code for an error of the library."""
    return next((code for kinds, code in _CODES if isinstance(error, kinds)), ExitCode.FAILURE)
