"""Questions as users give them: arguments, lines or JSON lines from stdin or a file, or typed at a prompt."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from protokv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Question:
    """One question, and the answer that is expected, if one is."""

    text: str
    expected: str | None = None


def read_questions(arguments: Sequence[str], stdin: IO[str] | None, file: Path | None) -> Iterator[Question]:
    """Those of a file, then the arguments in order; `-` stands for the lines of stdin.

    Raises:
        ConfigError: the file cannot be read, or a line is no question; it is named.
    """
    if file is not None:
        yield from _lines(_open(file), str(file))
    for argument in arguments:
        if argument == "-":
            yield from _lines(stdin or (), "stdin")
        else:
            yield Question(argument)


def _open(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"questions: {file} cannot be read: {reason}", hint="name a file of lines") from error


def _lines(lines: Iterable[str], place: str) -> Iterator[Question]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield _parse(line.strip(), f"line {number} of {place}")


def _parse(line: str, where: str) -> Question:
    if not line.startswith("{"):
        return Question(line)
    try:
        row = json.loads(line)
        question, expected = row["question"], row.get("answer")
    except (ValueError, KeyError, RecursionError) as error:
        raise ConfigError(
            f"{where} is not a JSON object with the key question: {error}",
            hint='write {"question": "..."} or the bare question, one a line',
        ) from error
    if not isinstance(question, str) or not isinstance(expected, str | None):
        raise ConfigError(f"{where}: question and answer must be text", hint="put them in quotes")
    return Question(question, expected)
