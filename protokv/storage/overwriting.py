"""What may be written over: never what is read, and what is there only if it belongs to the same stream.

Knows paths and headers of states; no models, and no command line.
"""

from __future__ import annotations

import os
from pathlib import Path

from protokv.core.snapshot import Header
from protokv.errors import ConfigError, StateError, StateMismatch, StateNotFound
from protokv.storage.api import read_header
from protokv.storage.form import StatePath, is_url
from protokv.storage.watched import fingerprints


def check_not_read(target: StatePath, *inputs: object) -> None:
    """Refuse to write over a file that is read, under whatever name.

    Raises:
        ConfigError: it is one of the inputs; those that are no paths, or not there, are left out.
    """
    for one in inputs:
        if isinstance(one, str | os.PathLike) and not is_url(target) and _is_same(target, one):
            raise ConfigError(
                f"{os.fspath(target)} is what is read, and would be written over", hint="name another file with -o"
            )


def check_replaceable(target: StatePath, state: Header) -> None:
    """Refuse to replace what is at a path unless it is a state of the same sources, or nothing.

    Raises:
        StateMismatch: it is something else.
    """
    try:
        there = fingerprints(read_header(target))
    except StateNotFound:
        return
    except StateError:
        there = ()
    if not there or None in there or there != fingerprints(state):
        what = "the state of another stream" if there else "no state that can be read"
        raise StateMismatch(f"{os.fspath(target)} is there already, and it is {what}", hint="replace it with --force")


def _is_same(target: StatePath, one: str | os.PathLike[str]) -> bool:
    try:
        return Path(target).samefile(one)
    except (OSError, ValueError):
        return False
