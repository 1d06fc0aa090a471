"""Questions as users give them: arguments, lines or JSON lines from stdin or a file, or typed at a prompt.

One that cannot be asked is told with its place, and the others are answered.

`exit`, `quit` and Ctrl-D end the prompt, `help` tells of it, `new` begins another conversation, and Ctrl-C drops the
line that is being typed.
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

from protokv.errors import ConfigError, ProtoKVError, QuestionError
from protokv.texts import admit_question, read_json
from protokv_cli.exits import Exit
from protokv_cli.output import Output
from protokv_cli.process import replace_stdin

PROMPT = "? "
# A question has at most 65,536 characters, and each may be six in JSON.
MOST_LINE = 1 << 20
_HINT = 'write {"question": "..."} or the bare question, one a line'
HELP = """Type a question and press Enter. The arrow keys bring back earlier ones.
What you typed before is part of the conversation; new begins another.
Ctrl-C drops the line or stops an answer. exit, quit or Ctrl-D ends.
"""


@dataclass(frozen=True, slots=True)
class AskedQuestion:
    """One question, the expected answer if there is one, and where it was given. QuestionError if it is no text.

    One that is not `fresh` goes on with the conversation before it.
    """

    text: str
    expected: str | None = None
    where: str = ""
    fresh: bool = True

    def __post_init__(self) -> None:
        admit_question(self.text)


class Refusals:
    """The questions that cannot be asked."""

    def __init__(self, out: Output) -> None:
        """Count from zero."""
        self._out, self._hints, self._count = out, set[str](), 0

    @contextmanager
    def at(self, where: str) -> Iterator[None]:
        """Tell of a question that is refused in this block, and go on. A hint is told once."""
        try:
            yield
        except QuestionError as error:
            self._count += 1
            self._out.error(f"Error: {where}{': ' if where else ''}{error.message}")
            if error.hint and error.hint not in self._hints:
                self._hints.add(error.hint)
                self._out.error(f"Hint: {error.hint}")

    def check(self) -> None:
        """End the command with the code for usage if a question was refused."""
        if self._count:
            raise typer.Exit(Exit.USAGE)


def read_questions(
    arguments: Sequence[str], stdin: IO[str] | None, file: Path | None, refusals: Refusals
) -> Iterator[AskedQuestion]:
    """Yield the questions of a file, then the arguments in order; `-` stands for the lines of stdin.

    Raises:
        ConfigError: the file cannot be read.
    """
    if file is not None:
        try:
            with open_lines(file) as lines:
                yield from _parse_lines(lines, str(file), refusals)
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"questions: {file} cannot be read: {reason}", hint="name a file of lines") from error
    for number, argument in enumerate(arguments, start=1):
        if argument == "-":
            yield from _parse_lines(stdin, "stdin", refusals) if stdin else ()
            continue
        where = f"question {number}" if len(arguments) > 1 else ""
        with refusals.at(where):
            yield AskedQuestion(argument, where=where)


def open_lines(file: Path) -> IO[str]:
    """Open a text file in UTF-8 or, if it begins with the mark of UTF-16, in that, as Windows writes both."""
    with file.open("rb") as beginning:
        marked = beginning.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    if marked:
        return file.open(encoding="utf-16", errors="replace")
    return file.open(encoding="utf-8-sig", errors="surrogateescape")


def _parse_lines(lines: IO[str], place: str, refusals: Refusals) -> Iterator[AskedQuestion]:
    number = 0
    while line := lines.readline(MOST_LINE):
        number += 1
        where, whole = f"line {number} of {place}", line
        # The rest of a line that is too long is left out.
        while len(line) == MOST_LINE and not line.endswith("\n"):
            line = lines.readline(MOST_LINE)
        with refusals.at(where):
            if len(whole) == MOST_LINE:
                raise QuestionError(f"it has {MOST_LINE:,} characters or more", hint="ask something shorter")
            # A pipe from a file of Windows, which marks UTF-8 so.
            if text := whole.removeprefix("\ufeff").strip():
                yield _parse(text, where)


def _parse(line: str, where: str) -> AskedQuestion:
    if not line.startswith("{"):
        return AskedQuestion(line, where=where)
    try:
        row = read_json(line)
        question, expected = row.get("question"), row.get("answer")
    except ValueError as error:
        raise QuestionError(f"not a JSON object: {error}", hint=_HINT) from error
    if not isinstance(question, str) or not isinstance(expected, str | None):
        raise QuestionError("question, and answer if there is one, must be text", hint=_HINT)
    return AskedQuestion(question, expected, where)


def read_typed_questions(stdin: IO[str], refusals: Refusals) -> Iterator[AskedQuestion]:
    """Yield the lines that a user types at the prompt, without empty ones: one conversation, until `new`."""
    with suppress(ImportError):
        # For the arrow keys.
        import readline  # noqa: F401
    fresh = True
    while True:
        try:
            with replace_stdin(stdin):
                line = _read_line()
        except EOFError:
            sys.stderr.write("\n")
            return
        except KeyboardInterrupt:
            sys.stderr.write("\n")
            continue
        match line.strip().lower().rstrip("()"):
            case "":
                continue
            case "exit" | "quit":
                return
            case "help" | "?":
                sys.stderr.write(HELP)
            case "new" | "/new":
                fresh = True
            case _:
                with refusals.at(""):
                    yield AskedQuestion(line.strip(), fresh=fresh)
                    fresh = False


def _read_line() -> str:
    if sys.stdout.isatty():
        return input(PROMPT)
    # stdout is for answers only.
    sys.stderr.write(PROMPT)
    sys.stderr.flush()
    return input()


@contextmanager
def survive_errors(out: Output, at_prompt: bool) -> Iterator[None]:
    """At a prompt, let neither a refused question nor Ctrl-C during an answer end the prompt."""
    try:
        yield
    except KeyboardInterrupt:
        if not at_prompt:
            raise
        out.error("")
    except ProtoKVError as error:
        if not at_prompt:
            raise
        out.error(f"Error: {error.message}")
