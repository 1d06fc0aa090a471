"""What a fleet has come to so far: the numbers of a run, and its failures as lines of a file."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from protokv import errors
from protokv.errors import StateError
from protokv_cli.exits import Exit, exit_code

if TYPE_CHECKING:
    from protokv.fleet import Failure, Outcome

# More failures than this are counted, not listed; the file has them all.
LISTED = 50


@dataclass
class Account:
    """Numbers of a run so far."""

    total: int
    by_status: Counter[str] = field(default_factory=Counter)
    failures: int = 0
    watched_s: float = 0.0
    file_bytes: int = 0

    def add(self, outcome: Outcome) -> None:
        """One more video has ended."""
        self.by_status[outcome.status] += 1
        self.failures += outcome.failure is not None
        self.watched_s += outcome.watched_s
        self.file_bytes += outcome.file_bytes

    @property
    def ended(self) -> int:
        """Videos of which the outcome is known, those that were stopped left out."""
        return self.by_status.total() - self.by_status["stopped"]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        counts = {status: self.by_status[status] for status in ("watched", "done", "stopped", "failed")}
        rest = {"left": self.total - self.ended, "failures": self.failures}
        return {"videos": self.total, **counts, **rest, "watched_s": self.watched_s, "file_bytes": self.file_bytes}


class Ledger:
    """Failures as they happen: a line of JSON each in a file, and the first of them for a table.

    Where there are none there is no file. What failed in an earlier run and is done now is in it no more.
    """

    def __init__(self, file: Path) -> None:
        self.file, self.rows = file, list[dict[str, Any]]()
        self._stream: IO[str] | None = None

    def __enter__(self) -> Ledger:
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.unlink(missing_ok=True)
        except OSError as error:
            raise StateError(
                f"cannot write {self.file}: {error.strerror}", hint="choose a folder that you may write to"
            ) from error
        return self

    def add(self, outcome: Outcome) -> None:
        """One more video has ended; where it failed that is written."""
        failure = outcome.failure
        if failure is None:
            return
        row = {
            **outcome.job.to_dict(),
            "state": outcome.state,
            "error": failure.kind,
            "message": failure.message,
            "hint": failure.hint,
            "exit_code": int(code_of(failure)),
            "attempts": outcome.attempts,
        }
        if len(self.rows) < LISTED:
            self.rows.append(row)
        if self._stream is None:
            self._stream = self.file.open("w", encoding="utf-8")
        self._stream.write(json.dumps(row) + "\n")
        self._stream.flush()

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.close()


def code_of(failure: Failure) -> Exit:
    """The exit code that `ingest` of this video alone would have had."""
    if failure.kind == "Damaged":
        return Exit.PARTIAL
    kind = getattr(errors, failure.kind, None)
    return exit_code(kind("")) if isinstance(kind, type) and issubclass(kind, errors.ProtoKVError) else Exit.FAILURE
