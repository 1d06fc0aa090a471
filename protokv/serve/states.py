"""The states of a folder by name, and the sessions that answer for them, from the last commit of
each state.

A name is looked up among the states that exist, so no request leads out of the folder, and neither
does a link. Knows no web.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from pathlib import Path
from threading import RLock

from protokv.core.backbone import Backbone, BackboneIdentity
from protokv.core.build import measure_device_memory
from protokv.errors import ProtoKVError, StateNotFound
from protokv.serve.handed import HandedSessions
from protokv.slots import SLOTS_SUFFIX
from protokv.state.folder import find_states
from protokv.state.forms import SafetensorsForm
from protokv.state.moments import find_stream_moment
from protokv.state.reader import StateReader
from protokv.state.sources import (
    VideoPlace,
    find_notice,
    list_state_sources,
    list_video_places,
)
from protokv.state.store import STATE_FORMS, StatePath
from protokv.stream.engine import Engine, EngineSession
from protokv.stream.opening import open_session
from protokv.stream.session import Session
from protokv.texts import find_invalid_character, shorten_text

# Sessions that stay in memory for the next question.
_MOST_SESSIONS = 8
_SUFFIX = SafetensorsForm.suffix


class StateFolder:
    """The states that are in a folder when they are asked for."""

    def __init__(
        self,
        folder: StatePath,
        backbone: Backbone,
        engine: Engine | None = None,
        calibrations: StatePath = "calibrations",
    ) -> None:
        """Read nothing yet; `backbone` made the states. With an engine, it has them by their names.
        `calibrations` is their folder.

        Sessions stay in memory: a few of them, which take half of what the device has.
        """
        self.folder = Path(folder)
        self.calibrations = Path(calibrations)
        self.backbone = backbone
        self._most_bytes = measure_device_memory(backbone.device) / 2
        self._root = self.folder.resolve()
        self.fed = dict[Path, Session]()  # sessions that clients feed answer for themselves
        self._sessions: OrderedDict[Path, tuple[tuple[int, int], Session]] = OrderedDict()
        self.engine = engine
        self._handed: HandedSessions | None = None
        # Who has it may use the model, and sessions that watch.
        self.lock = RLock()
        self.decoding = backbone.decoding
        self.decode = backbone.decode

    def list_all(self) -> dict[str, Path]:
        """Return the states by name: the path below the folder, without `.safetensors`."""
        try:
            found = [Path(one) for one in find_states(str(self.folder))]
        except StateNotFound:
            return {}
        # Nobody opens a state whose name is no text.
        return {
            one.relative_to(self.folder).as_posix().removesuffix(_SUFFIX): one
            for one in found
            if self.holds(one) and find_invalid_character(str(one)) is None
        }

    def find(self, name: str) -> Path:
        """Return where the state of a name is, without a look at the others. StateNotFound."""
        if all(part and not part.startswith(".") for part in name.split("/")):
            path = self.folder / name
            if path.suffix not in STATE_FORMS:
                path = path.with_name(path.name + _SUFFIX)
            if self.holds(path):
                return path
        raise StateNotFound(f"there is no state {name!r}; the list of states has their names")

    def word_error(self, error: ProtoKVError) -> str:
        """Return an error in a line, without the way to the folder, which clients need not know."""
        text = " ".join(error.message.split())
        for folder in (self._root, self.folder):
            text = text.replace(f"{folder}{os.sep}", "")
        return shorten_text(text)

    def holds(self, path: Path) -> bool:
        """Return True for a file or folder of this folder, and no link out of it; a pipe would be
        waited for.
        """
        try:
            return (path.is_file() or path.is_dir()) and path.resolve().is_relative_to(self._root)
        except (OSError, RuntimeError, ValueError):  # a link to itself, or no name of a file
            return False

    def read_commit_time(self, path: Path) -> int:
        """Return when a state was last committed, in seconds since 1970; 0 if it is gone."""
        try:
            return int(path.stat().st_mtime)
        except OSError:
            return 0

    def open_session(self, path: Path, at: str | None = None) -> Session:
        """Return who answers for a state.

        Without a time it is the session that clients feed, else one of the last commit. With `at`,
        read as `query --at` does, it is one of a kept commit, opened for this question alone. Only
        one thread may use a session at a time; a session of an engine serves many threads.

        StateNotFound: it is gone. StateError: it cannot be read, or another model made it.
        OutOfMemory: its budget takes more than is free.
        ConfigError: no engine can serve it, or it is no time.
        """
        with self.lock:
            found = self._open_session(path) if at is None else self._open_commit(path, at)
            return self.show(found)

    def let_watch(self) -> None:
        """Prepare for sessions that watch here: an engine answers for them, too. Raises as
        `HandedSessions`.
        """
        if self.engine is not None:
            self._handed = HandedSessions(self.engine, self.folder)

    def end_watch(self) -> None:
        """Remove what was written for the engine; nothing is watched here any more."""
        self._handed = None

    def show(self, session: Session) -> Session:
        """Return who answers for a session that was opened or watches: itself, or the engine.
        Raises as `HandedSessions.hand_over`.
        """
        if self._handed is None or isinstance(session, EngineSession):
            return session
        return self._handed.hand_over(session)

    def _open_session(self, path: Path) -> Session:
        version = _version(path)
        if (fed := self.fed.get(path)) is not None:
            return fed
        known = self._sessions.pop(path, None)
        if known is None or known[0] != version:
            known = (version, self._open(path, StateReader.open(path)))
        self._sessions[path] = known
        while len(self._sessions) > 1 and (
            len(self._sessions) > _MOST_SESSIONS
            or sum(one.state_bytes for _, one in self._sessions.values()) > self._most_bytes
        ):
            self._sessions.popitem(last=False)
        return known[1]

    def read_remarks(self, path: Path) -> tuple[str, list[VideoPlace]]:
        """Return what to say of every answer of a state, and where its videos are in its stream.
        StateError.
        """
        header = StateReader.open(path).header
        return find_notice(header), list_video_places(list_state_sources(header))

    def _open_commit(self, path: Path, at: str) -> Session:
        reader = StateReader.open(path)
        moment = find_stream_moment(at, reader, time.time())
        return self._open(path, reader.at(moment.stream_s))

    def _open(self, path: Path, reader: StateReader) -> Session:
        written = path.with_suffix(SLOTS_SUFFIX).is_file()
        if self.engine is None or (self._handed and not written):
            return open_session(reader, self.backbone)
        name = path.relative_to(self.folder).with_suffix("").as_posix()
        return EngineSession.open(reader, self.engine, name, self.backbone)


def name_model(identity: BackboneIdentity) -> str:
    """Return the name of a model for clients: of a folder its last part."""
    path = Path(identity.name)
    return path.name if path.is_absolute() else identity.name


def _version(path: Path) -> tuple[int, int]:
    """Return a value that changes with every commit, which replaces the file or the folder."""
    try:
        status = path.stat()
    except OSError:
        return (0, 0)
    return (status.st_ino, status.st_mtime_ns)
