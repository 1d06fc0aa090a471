"""Sessions that are watched here, and answered by an engine of others: what they have seen is
written where the engine reads it.

Each file has a random name in a hidden folder, so nobody can list or guess it. It is written once
for what a session has seen, and goes when neither the session nor a question needs it.
"""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path
from secrets import token_hex
from weakref import WeakKeyDictionary, finalize

from protokv.slots import SLOTS_SUFFIX
from protokv.state.commit import lock, remove_entry
from protokv.stream.engine import Engine, EngineSession
from protokv.stream.session import Session
from protokv.stream.slots import write_stream

_HIDDEN = ".asked"


class HandedSessions:
    """The sessions of a folder that an engine answers for. One thread at a time may use it."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        """Begin without any; the engine reads `folder`. StateLocked: another server does that
        there. StateError.
        """
        self._engine = engine
        self._folder = folder / _HIDDEN
        self._handed = WeakKeyDictionary[Session, EngineSession]()
        with ExitStack() as held:
            held.enter_context(lock(self._folder))
            # A server that was killed has left it.
            remove_entry(self._folder)
            self._folder.mkdir()
            held.callback(shutil.rmtree, self._folder, ignore_errors=True)
            finalize(self, held.pop_all().close)

    def hand_over(self, session: Session) -> EngineSession:
        """Write what a session has seen until now; return one like it that the engine answers for.

        ConfigError: no engine can. StateError: it cannot be written.
        """
        known = self._handed.get(session)
        if known is None or known.clock != session.clock:
            known = EngineSession.restore(session.make_state(), session.backbone)
            commit = token_hex(16)
            path = self._folder / (commit + SLOTS_SUFFIX)
            finalize(known, path.unlink, missing_ok=True)
            write_stream(known, commit, path)
            self._handed[session] = known.answer_by(self._engine, f"{_HIDDEN}/{commit}", commit)
        return known
