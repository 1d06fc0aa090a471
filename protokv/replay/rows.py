"""Results as JSON lines: one row per question, delay and memory, appended as soon as it is known.

Owns the row, the file and what is already done in it. A killed run leaves at most one torn last line, which is dropped
when the run is resumed.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, Self

from protokv.errors import ConfigError, SourceNotFound
from protokv.replay.questions import Reference


@dataclass(frozen=True, slots=True)
class Row:
    """One answer under one memory.

    Attributes:
        video, question_id, question, type, expected: what was asked about what.
        reference, reference_s, delay_s, asked_s: what t0 is and when, the delay, and the stream time of the asking:
            the end of the first step that is not before t0 + delay.
        memory: the label of the run; `budget` and `config` say what it was.
        prediction, correct: what came.
        ttft_ms, total_ms: from the question's arrival to the first and to the last token.
        context_tokens: slots of memory that attention could see.
        state_bytes: of the memory.
        peak_bytes: of the process so far, or of the device's allocator where the model runs on one.
        seconds_per_step: of the memory's updates until then, encoding included, the shared vision tower not.
        tokens_seen: visual tokens of the stream until then.
    """

    video: str
    question_id: str
    question: str
    type: str
    expected: str
    reference: Reference
    reference_s: float
    delay_s: float
    asked_s: float
    memory: str
    budget: int
    config: dict[str, Any]
    prediction: str
    correct: bool
    ttft_ms: float
    total_ms: float
    context_tokens: int
    state_bytes: int
    peak_bytes: int
    seconds_per_step: float
    tokens_seen: int

    @property
    def key(self) -> tuple[str, str, str, int, float]:
        """What makes it this row: stream, question, memory, budget and delay."""
        return self.video, self.question_id, self.memory, self.budget, self.delay_s

    @classmethod
    def from_json(cls, data: object) -> Self:
        """A row out of a parsed line; keys that are not known are left out.

        Raises:
            ValueError: it is no object, or a field is missing.
        """
        if not isinstance(data, dict):
            raise ValueError("not a JSON object")
        names = [field.name for field in fields(cls)]
        missing = [name for name in names if name not in data]
        if missing:
            raise ValueError(f"{missing[0]} is missing")
        return cls(**{name: data[name] for name in names})


def read_rows(paths: Iterable[str | Path]) -> list[Row]:
    """All rows of some files, packed with gzip where they end in .gz; of the same row in several, the last one.

    Raises:
        SourceNotFound: a file does not exist.
        ConfigError: a line that is not the last of its file is no row, or a packed file is damaged.
    """
    rows: dict[tuple[str, str, str, int, float], Row] = {}
    for path in map(Path, paths):
        if not path.is_file():
            raise SourceNotFound(f"there are no results at {path}", hint="protokv replay ... -o results.jsonl")
        lines = _text(path).split("\n")
        for number, line in enumerate(lines, start=1):
            try:
                row = Row.from_json(json.loads(line)) if line.strip() else None
            except ValueError as error:
                if number == len(lines):
                    continue
                raise ConfigError(f"{path} line {number} is not a row of results: {error}") from error
            if row:
                rows[row.key] = row
    return list(rows.values())


# What a row begins with; only a torn row may be cut off.
_ROW_START: Final = b'{"video": '


def _text(path: Path) -> str:
    try:
        return (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as results: {error}") from error


class RowFile:
    """A file that rows are appended to."""

    def __init__(self, path: str | Path, *, start_over: bool = False) -> None:
        """Read what is done already; a torn last line is cut off.

        Raises:
            ConfigError: the file holds something else.
        """
        self._path = Path(path)
        if start_over or not self._path.exists():
            self._path.write_text("", encoding="utf-8")
        self.rows = {row.key: row for row in read_rows([self._path])}
        whole, newline, torn = self._path.read_bytes().rpartition(b"\n")
        if torn and torn[: len(_ROW_START)] != _ROW_START[: len(torn)]:
            raise ConfigError(f"{path} does not end in a row of results", hint="name another file with -o")
        if torn:
            self._path.write_bytes(whole + newline)

    def append(self, row: Row) -> None:
        """Write one row and hand it to the operating system."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(row), ensure_ascii=False) + "\n")
        self.rows[row.key] = row
