"""Save a session, and check what a state would be written over."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from protokv.core.session import Session
from protokv.errors import ConfigError, StateCorrupt, StateMismatch, StateNotFound
from protokv.state.checkpoint import make_state
from protokv.state.header import State, StateHeader
from protokv.state.sources import read_fingerprints
from protokv.state.store import StatePath, find_store


def save(session: Session, path: StatePath, *, source: dict[str, Any] | None = None, complete: bool = False) -> int:
    """Write a session so that the path holds the old or the new state whole; return the stored bytes.

    The suffix of the path chooses the form. `source` is the record of the watched source, plain JSON; `complete` says
    that it has ended.

    Raises:
        StateLocked: another writer is writing the state.
        StateError: the state cannot be written; the old one is still there.
    """
    return save_state(make_state(session, source=source, complete=complete), path)


def save_state(state: State, path: StatePath) -> int:
    """Write a state, as `save` a session."""
    with find_store(path) as store:
        return store.commit(state)


def refuse_input_as_target(target: StatePath, *inputs: object) -> None:
    """Refuse a target that is an input, also under another name. Inputs that are no existing paths are ignored."""
    for one in inputs:
        with suppress(OSError, ValueError):
            if isinstance(one, str | os.PathLike) and Path(target).samefile(one):
                what = f"{os.fspath(target)} is what is read, and would be written over"
                raise ConfigError(what, hint="name another file with -o")


def check_state_replaceable(target: StatePath, state: StateHeader) -> None:
    """Allow to replace a state of the same sources, or nothing. StateMismatch if something else is there."""
    try:
        there = read_fingerprints(find_store(target, to_read=True).read_header()[0])
    except StateNotFound:
        return
    except (StateCorrupt, StateMismatch):
        there = ()
    if not there or None in there or there != read_fingerprints(state):
        what = "the state of another stream" if there else "no state that can be read"
        raise StateMismatch(f"{os.fspath(target)} is there already, and it is {what}", hint="replace it with --force")
