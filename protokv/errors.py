"""Every error that a user can cause, as one tree below `ProtoKVError`.

A message says what was expected, what came and where; a hint says what to do. The library raises
these and never prints; the command line maps each to one line and an exit code. `escape_text` makes
foreign text fit for a message, `suggest_name` makes the hint for an unknown name, and
`find_system_error` finds the error of the system in the error of a library.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable
from difflib import get_close_matches


class ProtoKVError(Exception):
    """Base of all errors a user can cause: `message` (what, where) and `hint` (what to do, may be
    empty).
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class ConfigError(ProtoKVError):
    """A setting is out of range, unknown, or contradicts another."""


class OutOfMemory(ProtoKVError):
    """This process may not have the memory, or the threads, that it needs."""


class QuestionError(ConfigError):
    """A question cannot be asked; others can."""


class PositionWarning(UserWarning):
    """The stream has left the positions that the model was trained on."""


class ModelError(ProtoKVError):
    """A model cannot be found, loaded or used."""


class ModelNotFound(ModelError):
    """There is no such model folder, and no such model on the hub."""


class EngineError(ProtoKVError):
    """An engine of others does not answer, or refuses to."""


class JudgeError(ProtoKVError):
    """A judge of answers cannot be asked at all; what it said already is kept."""


class SourceError(ProtoKVError):
    """A video source cannot be used."""


class SourceNotFound(SourceError):
    """There is nothing at the path of the video."""


class SourceDenied(SourceError):
    """The source is there, and wants another user or password."""


class SourceUnreadable(SourceError):
    """There is something at the path, but no video can be read from it."""


class StateError(ProtoKVError):
    """A saved state cannot be used."""


class UnknownForm(StateError):
    """The name of a state ends in nothing that tells which form it has."""


class StateNotFound(StateError):
    """There is nothing at the path of the state."""


class StateLocked(StateError):
    """Another process is writing the state."""


class StateMismatch(StateError):
    """The state does not fit the model, the memory configuration or this version of the format."""


class StateCorrupt(StateError):
    """The bytes of the state are damaged, or were never a state."""


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return `did you mean NAME?` with the known name that is most like a mistyped one; empty if
    none is.
    """
    names = {one.lower(): one for one in known}
    if str(name).lower() in names:
        return ""
    near = get_close_matches(str(name)[:80].lower(), names, n=1)
    return f"did you mean {names[near[0]]}?" if near else ""


def suggest_name(name: object, known: Iterable[str], *, others: str = "") -> str:
    """Return the hint for an unknown name: the nearest known name, and all known names.

    Args:
        name: what was given.
        known: the names, in the order to show.
        others: further possibilities, such as `or the path of a .toml file`.
    """
    names = list(known)
    everything = " ".join(["use one of", ", ".join(names), *([others] if others else [])])
    return " ".join(filter(None, (did_you_mean(name, names), everything)))


def escape_text(text: object, length: int = 80) -> str:
    """Return text from a file or a library, fit for a message: ASCII, one line, from at most
    `length` characters.
    """
    return ascii(str(text)[:length])[1:-1]


def find_system_error(error: Exception) -> OSError | MemoryError | None:
    """Return the system's error that an exception is or tells in words; None if it tells another.

    Libraries turn a failed call into text, such as "Input/output error (os error 5)" or "Cannot
    allocate memory (12)".
    """
    if isinstance(error, (OSError, MemoryError)):
        return error
    text = str(error)
    named = [int(one) for one in re.findall(r"\b\d{1,3}\b", text)]
    return next(
        (OSError(one, os.strerror(one)) for one in named if one and os.strerror(one) in text), None
    )


def format_os_error(error: Exception) -> str:
    """Return the words of a system's error, without a path."""
    if isinstance(error, MemoryError):
        return os.strerror(errno.ENOMEM)
    return getattr(error, "strerror", None) or str(error)
