"""The states of a folder by name, and the sessions that answer for them: one model, the last commit of each state.

A name is looked up among those that are there, so that no request leads anywhere else. Knows no web.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from pathlib import Path

from protokv import storage
from protokv.backbones.base import Backbone
from protokv.core.session import Session
from protokv.errors import StateNotFound
from protokv.fleet.plan import find_states
from protokv.storage.checkpoint import from_state

# Sessions that are kept for the next question.
MOST_SESSIONS = 8


class States:
    """What is in a folder, at the time of asking."""

    def __init__(self, folder: str | os.PathLike[str], backbone: Backbone, most: int = MOST_SESSIONS) -> None:
        """Nothing is read yet.

        Args:
            folder: holds the states.
            backbone: the model that made them.
            most: sessions that are held at the most.
        """
        self._folder, self._backbone, self._most = Path(folder), backbone, most
        self._sessions: OrderedDict[Path, tuple[tuple[int, int], Session]] = OrderedDict()
        self._lock = threading.Lock()

    def names(self) -> dict[str, Path]:
        """The states that are there now: paths below the folder, without the suffix unless two differ in it alone."""
        try:
            found = [Path(one) for one in find_states(str(self._folder))]
        except StateNotFound:
            return {}
        below = [one.relative_to(self._folder).as_posix() for one in found]
        stems = [one.removesuffix(Path(one).suffix) for one in below]
        return {
            stem if stems.count(stem) == 1 else whole: one for stem, whole, one in zip(stems, below, found, strict=True)
        }

    def find(self, name: str) -> Path:
        """Where the state of this name is. StateNotFound: there is none here."""
        path = self.names().get(name)
        if path is None:
            raise StateNotFound(f"there is no state {name!r}; /v1/models lists those that there are")
        return path

    def created(self, path: Path) -> int:
        """When a state was last committed, in seconds since 1970; 0 where it is gone."""
        try:
            return int(path.stat().st_mtime)
        except OSError:
            return 0

    def session(self, path: Path) -> Session:
        """The session of a state, found by its name, as it was last committed. Not for two threads at once.

        Raises:
            StateNotFound: it is gone.
            StateError: it cannot be read, or another model made it.
        """
        with self._lock:
            version = _version(path)
            known = self._sessions.pop(path, None)
            if known is None or known[0] != version:
                known = (version, from_state(storage.load_state(path), self._backbone))
            self._sessions[path] = known
            while len(self._sessions) > self._most:
                self._sessions.popitem(last=False)
            return known[1]


def _version(path: Path) -> tuple[int, int]:
    """What changes with every commit: another file, or another folder, is put in place."""
    try:
        status = path.stat()
    except OSError:
        return (0, 0)
    return (status.st_ino, status.st_mtime_ns)
