"""Questions as users give them: arguments, lines or JSON lines from stdin or a file, or typed at a prompt.

One that cannot be asked is told with its place, and the others are answered.
"""

from __future__ import annotations

import codecs
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import typer

from protokv.errors import ConfigError, QuestionError
from protokv.texts import admit_question, read_json
from protokv_cli.exits import Exit
from protokv_cli.output import Output

_HINT = 'write {"question": "..."} or the bare question, one a line'


@dataclass(frozen=True, slots=True)
class AskedQuestion:
    """One question, the expected answer if there is one, and where it was given. QuestionError if it is no text."""

    text: str
    expected: str | None = None
    where: str = ""

    def __post_init__(self) -> None:
        admit_question(self.text)


class Refusals:
    """The questions that cannot be asked."""

    def __init__(self, out: Output) -> None:
        self._out, self._told = out, set[str]()

    @contextmanager
    def at(self, where: str) -> Iterator[None]:
        """Tell of a question that is refused in this block, and go on. Each line is told once."""
        try:
            yield
        except QuestionError as error:
            lines = {f"Error: {where}{': ' if where else ''}{error.message}": None}
            for line in lines | ({f"Hint: {error.hint}": None} if error.hint else {}):
                if line not in self._told:
                    self._told.add(line)
                    self._out.error(line)

    def check(self) -> None:
        """End the command with the code for usage if a question was refused."""
        if self._told:
            raise typer.Exit(Exit.USAGE)


def read_questions(arguments: Sequence[str], file: Path | None, refusals: Refusals) -> Iterator[AskedQuestion]:
    """Yield the questions of a file, then the arguments; `-` stands for the lines of stdin. ConfigError: no file."""
    if file is not None:
        try:
            with open_lines(file) as lines:
                yield from _parse_lines(lines, str(file), refusals)
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"questions: {file} cannot be read: {reason}", hint="name a file of lines") from error
    for number, argument in enumerate(arguments, start=1):
        if argument == "-":
            with suppress(AttributeError):  # no file
                # Bytes that are no UTF-8 are told with their line.
                sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # type: ignore[union-attr]
            yield from _parse_lines(sys.stdin, "stdin", refusals)
        else:
            where = f"question {number}" if len(arguments) > 1 else ""
            with refusals.at(where):
                yield AskedQuestion(argument, where=where)


def open_lines(file: Path) -> IO[str]:
    """Open a text file in UTF-8 or, if it begins with the mark of UTF-16, in that, as Windows writes both."""
    with file.open("rb") as beginning:
        marked = beginning.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    encoding, errors = ("utf-16", "replace") if marked else ("utf-8-sig", "surrogateescape")
    return file.open(encoding=encoding, errors=errors)


def _parse_lines(lines: IO[str], place: str, refusals: Refusals) -> Iterator[AskedQuestion]:
    for number, line in enumerate(lines, start=1):
        where = f"line {number} of {place}"
        with refusals.at(where):
            # A pipe from a file of Windows, which marks UTF-8 so.
            if text := line.removeprefix("\ufeff").strip():
                yield _parse(text, where)


def _parse(line: str, where: str) -> AskedQuestion:
    if not line.startswith("{"):
        return AskedQuestion(line, where=where)
    try:
        row = read_json(line)
    except ValueError as error:
        raise QuestionError(f"not a JSON object: {error}", hint=_HINT) from error
    question, expected = row.get("question"), row.get("answer")
    if not isinstance(question, str) or not isinstance(expected, str | None):
        raise QuestionError("question, and answer if there is one, must be text", hint=_HINT)
    return AskedQuestion(question, expected, where)


def read_typed_questions(refusals: Refusals) -> Iterator[AskedQuestion]:
    """Yield the lines that a user types at the prompt, until exit, quit or Ctrl-D; Ctrl-C drops a line."""
    with suppress(ImportError):
        # For the arrow keys.
        import readline  # noqa: F401
    line = ""
    while line.lower() not in ("exit", "quit"):
        with refusals.at(""):
            if line:
                yield AskedQuestion(line)
        try:
            # The prompt goes to stdout, which is for answers only unless it is the terminal.
            line = input("? " if sys.stdout.isatty() else "").strip()
        except KeyboardInterrupt:
            line = ""
            sys.stderr.write("\n")
        except EOFError:
            sys.stderr.write("\n")
            return
