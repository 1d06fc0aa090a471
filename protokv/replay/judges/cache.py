"""Replies of a judge on disk, one SQLite table: a rerun, and an interrupted run, pay for nothing twice."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

from protokv.errors import ConfigError
from protokv.replay.judges.base import Case


class ReplyCache:
    """Key -> text of a reply. Used from one thread."""

    def __init__(self, path: Path) -> None:
        """Open or make the file.

        Raises:
            ConfigError: it is something else, or cannot be written.
        """
        self._path = path
        try:
            with closing(self._connect()) as table:
                table.execute("create table if not exists replies (key text primary key, reply text not null)")
                table.commit()
        except sqlite3.Error as error:
            raise ConfigError(f"{path} is no cache of replies: {error}", hint="name another file") from error

    @staticmethod
    def key(label: str, case: Case) -> str:
        """What decides a reply: the judge, its prompt and the case."""
        return hashlib.sha256(json.dumps([label, asdict(case)], sort_keys=True).encode()).hexdigest()

    def find(self, keys: Sequence[str]) -> dict[str, str]:
        """Those of some keys that are there."""
        with closing(self._connect()) as table:
            found = (table.execute("select key, reply from replies where key = ?", (key,)) for key in set(keys))
            return {key: reply for rows in found for key, reply in rows}

    def keep(self, key: str, reply: str) -> None:
        """Write one reply."""
        with closing(self._connect()) as table:
            table.execute("insert or replace into replies values (?, ?)", (key, reply))
            table.commit()

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self._path)
