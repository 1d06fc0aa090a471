"""The streams of a command: results to stdout, messages and errors to stderr, and the user's stdin.

Results have one of three formats: `table` for people, `json` (one object a line) for programs, `plain` for shells.
Without `--format`, a terminal gets tables and a pipe gets JSON. A lost stderr is ignored. A lost stdout ends a command
whose purpose is its output, but not one whose purpose is a state.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from functools import cached_property
from typing import IO, TYPE_CHECKING, Any

import typer

from protokv.errors import PositionWarning, ProtoKVError, read_cause, shown
from protokv.machine import is_out_of_memory, require_address_space
from protokv.texts import cut
from protokv_cli.exits import Exit, find_exit_code
from protokv_cli.process import withhold_stdin
from protokv_cli.tables import format_json, make_printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

Row = dict[str, Any]
# Of a message: what a user or a file gave may be in it.
MOST_CHARACTERS = 2000


class Format(StrEnum):
    """The format of stdout."""

    AUTO = "auto"
    TABLE = "table"
    JSON = "json"
    PLAIN = "plain"


class Output:
    """The streams of one command.

    Attributes:
        format: of stdout; never `auto`.
        quiet: write no notes.
        debug: show tracebacks.
        stdin: the user's stdin inside `errors`; no library can read it.
        lost: the error that writing to stdout failed with; nothing more is written there.
        hide: takes a bar off the terminal, so that a line can be written in its place.
    """

    def __init__(
        self, fmt: Format = Format.AUTO, *, quiet: bool = False, debug: bool = False, outlives_stdout: bool = False
    ) -> None:
        """Resolve the format. Go on after stdout is lost if the command `outlives_stdout`."""
        if fmt is Format.AUTO:
            fmt = Format.TABLE if sys.stdout.isatty() else Format.JSON
        self.format, self.quiet, self.debug = fmt, quiet, debug
        self.stdin: IO[str] | None = None
        self.lost: OSError | None = None
        self.hide: Callable[[], None] = lambda: None
        self._outlives_stdout = outlives_stdout

    @cached_property
    def messages(self) -> Console:
        """The console of progress, on stderr."""
        from rich.console import Console

        return Console(stderr=True, highlight=False, markup=False, emoji=False)

    @cached_property
    def _console(self) -> Console:
        from rich.console import Console

        return Console(highlight=False, markup=False, emoji=False)

    @property
    def draws(self) -> bool:
        """Whether bars are drawn: stderr is a terminal that can move its cursor, and not `--quiet`."""
        if self.quiet or os.environ.get("TERM", "").lower() in ("dumb", "unknown"):
            return False
        try:
            return sys.stderr.isatty()
        except ValueError:  # closed
            return False

    def table(self, *rows: RenderableType, style: str | None = None, end: str = "\n") -> None:
        """Write tables and styled text to stdout."""
        with self._console.capture() as captured:
            for row in rows:
                self._console.print(make_printable(row) if isinstance(row, str) else row, style=style, end=end)
        self._write(captured.get())

    def clear(self) -> None:
        """Clear the screen if stdout is a terminal."""
        if self._console.is_terminal:
            self._write("\x1b[H\x1b[2J")

    def json(self, row: Row) -> None:
        """Write one JSON object as one line of stdout, and flush."""
        self._write(format_json(row) + "\n")

    def plain(self, text: str, end: str = "\n") -> None:
        """Write text to stdout; its lines stay lines."""
        self._write(make_printable(text, lines=True) + end)

    def show(
        self,
        rows: Iterable[Row],
        lines: Callable[[Row], Iterable[str]],
        tables: Callable[[Iterable[Row]], Iterable[RenderableType]],
    ) -> None:
        """Write rows to stdout as they come: as JSON, the lines of each, or the tables of all."""
        if self.format is Format.TABLE:
            for table in tables(rows):
                self.table(table)
            return
        for row in rows:
            if self.format is Format.JSON:
                self.json(row)
            else:
                for line in lines(row):
                    self.plain(line)

    def note(self, text: str) -> None:
        """Write a note or a warning to stderr, unless `--quiet`."""
        if not self.quiet:
            self.error(text)

    def error(self, text: str) -> None:
        """Write a line to stderr; a terminal gets it wrapped at words, unless a word is too long for it."""
        # The terminal may be closed, or nobody may read the pipe.
        with suppress(OSError, ValueError):
            self.hide()
            line = cut(make_printable(text), MOST_CHARACTERS)
            if sys.stderr.isatty():
                width = shutil.get_terminal_size().columns - 1
                line = textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
            sys.stderr.write(line + "\n")
            sys.stderr.flush()

    def _write(self, text: str) -> None:
        if self.lost is not None:
            return
        try:
            if sys.stdout.isatty():
                self.hide()
            sys.stdout.write(text)
            sys.stdout.flush()
        except OSError as error:
            self.lost = error
            # Python would complain once more when it flushes stdout at exit.
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if not self._outlives_stdout:
                raise _StdoutLost from error

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turn an error into `Error:`, `Hint:` and its exit code, and a warning of the library into one line."""
        try:
            with self._warnings(), withhold_stdin() as self.stdin:
                require_address_space()
                yield
                self._check_stdout()
        except _StdoutLost:
            self._check_stdout()
        except (KeyboardInterrupt, typer.Exit):
            raise
        except Exception as error:
            if self.debug:
                traceback.print_exc()
            message, hint, code = _explain(error)
            self.error(f"Error: {' '.join(message.split())}")
            if hint:
                self.error(f"Hint: {' '.join(hint.split())}")
            for note in getattr(error, "__notes__", ()):
                self.error(f"Note: {note}")
            raise typer.Exit(code) from error

    @contextmanager
    def _warnings(self) -> Iterator[None]:
        with warnings.catch_warnings():
            show_others = warnings.showwarning

            def show(message: Warning | str, category: type[Warning], *where: Any) -> None:
                if issubclass(category, PositionWarning):
                    self.note(f"Warning: {message}")
                elif not self.quiet:
                    show_others(message, category, *where)

            warnings.simplefilter("always", PositionWarning)
            warnings.showwarning = show  # type: ignore[assignment]
            yield

    def _check_stdout(self) -> None:
        """Fail if stdout could not be written; a reader who left is no failure."""
        if self.lost is not None and not isinstance(self.lost, BrokenPipeError):
            self.error(f"Error: stdout cannot be written: {self.lost.strerror}")
            self.error("Hint: make room there, or write to another place, and run the command again")
            raise typer.Exit(Exit.FAILURE)


def _explain(error: Exception) -> tuple[str, str | None, Exit]:
    """Return what happened, what to do about it, and the exit code."""
    if isinstance(error, ProtoKVError):
        return error.message, error.hint, find_exit_code(error)
    if is_out_of_memory(error):
        what = "there is not enough memory, or the limit of this process is too low (ulimit -v)"
        hint = "free some memory, raise the limit, or use a smaller budget or model"
    elif isinstance(error, OSError) and error.filename is not None:
        what = f"{shown(error.filename)}: {read_cause(error)}"
        hint = "mend what the system refuses and run it again; --debug shows the traceback"
    else:
        what = f"{type(error).__name__}: {str(error).strip() or 'no message'}"
        hint = "run again with --debug for the traceback; it looks like a bug of protokv"
    return what, hint, Exit.FAILURE


class _StdoutLost(Exception):
    """Stdout cannot be written, and the command has nothing else to do."""
