"""Questions as users give them: arguments, lines or JSON lines from stdin or a file, or typed at a prompt.

The history of the prompt is in `protokv/history` of `XDG_STATE_HOME`, readable to its user alone. `exit`, `quit` and
Ctrl-D end the prompt, `help` tells of it, and Ctrl-C drops the line that is being typed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from protokv.errors import ConfigError, ProtoKVError
from protokv_cli.output import Output
from protokv_cli.process import lent_stdin

PROMPT = "? "
HISTORY_LINES = 1000
HELP = """Type a question and press Enter. The arrow keys bring back earlier ones.
Ctrl-C drops the line or stops an answer. exit, quit or Ctrl-D ends.
"""


@dataclass(frozen=True, slots=True)
class Question:
    """One question, and the expected answer if there is one."""

    text: str
    expected: str | None = None


def read_questions(arguments: Sequence[str], stdin: IO[str] | None, file: Path | None) -> Iterator[Question]:
    """Yield the questions of a file, then the arguments in order; `-` stands for the lines of stdin.

    Raises:
        ConfigError: the file cannot be read, or a line is no question; the line is named.
    """
    if file is not None:
        yield from _parse_lines(_read_lines(file), str(file))
    for argument in arguments:
        if argument == "-":
            yield from _parse_lines(stdin or (), "stdin")
        else:
            yield Question(argument)


def _read_lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"questions: {file} cannot be read: {reason}", hint="name a file of lines") from error


def _parse_lines(lines: Iterable[str], place: str) -> Iterator[Question]:
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


def typed_questions(stdin: IO[str]) -> Iterator[Question]:
    """Yield the lines that a user types at the prompt, without empty ones."""
    with _history():
        while True:
            try:
                with lent_stdin(stdin):
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
                case _:
                    yield Question(line.strip())


def _read_line() -> str:
    if sys.stdout.isatty():
        return input(PROMPT)
    # stdout is for answers only.
    sys.stderr.write(PROMPT)
    sys.stderr.flush()
    return input()


@contextmanager
def _history() -> Iterator[None]:
    """Load the history, and save it at the end; without readline or a place for it there is none."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    file = Path(base) / "protokv" / "history"
    loaded = False
    with suppress(ImportError, OSError):
        import readline

        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
        readline.read_history_file(file)
        loaded = True
    try:
        yield
    finally:
        if loaded:
            with suppress(OSError):
                readline.set_history_length(HISTORY_LINES)
                readline.write_history_file(file)


@contextmanager
def surviving_errors(out: Output, at_prompt: bool) -> Iterator[None]:
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
