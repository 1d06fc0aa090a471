"""Where results, messages and errors go, and where questions come from.

Data goes to stdout in one of three formats: `table` for people, `json` (one object a line) for programs, `plain` for
shells. Everything else goes to stderr. Without `--format`, stdout decides: a terminal gets tables, a pipe gets JSON.
Foreign text is made printable here (`printable`), and nothing in it is read as markup. A stderr that is gone is no
error; a stdout that is gone ends a command whose purpose is its output, and not one whose purpose is a state.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from functools import cached_property
from typing import IO, TYPE_CHECKING, Any

import typer

from protokv.errors import PositionWarning, ProtoKVError
from protokv_cli.exits import Exit, exit_code
from protokv_cli.printable import json_text, printable
from protokv_cli.stdin import withheld_stdin

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


class Format(StrEnum):
    """How results are written to stdout."""

    AUTO = "auto"
    TABLE = "table"
    JSON = "json"
    PLAIN = "plain"


class Output:
    """The streams of one command.

    Attributes:
        format: of stdout.
        quiet: no notes.
        debug: tracebacks.
        stdin: what the user pipes in, inside `errors`; no library can read it.
        lost: what writing to stdout failed with; nothing is written there any more.
        hide: takes a bar off the terminal, so that a line can be written where it stood.
    """

    def __init__(self, fmt: Format, *, as_json: bool, quiet: bool, debug: bool, outlives_stdout: bool = False) -> None:
        """Resolve the format once; `--json` wins over `--format`.

        Args:
            fmt: as it was asked for.
            as_json: `--json`.
            quiet: `--quiet`.
            debug: `--debug`.
            outlives_stdout: the command goes on where stdout is gone.
        """
        chosen = Format.JSON if as_json else fmt
        if chosen is Format.AUTO:
            chosen = Format.TABLE if sys.stdout.isatty() else Format.JSON
        self.format = chosen
        self.quiet = quiet
        self.debug = debug
        self.stdin: IO[str] | None = None
        self.lost: OSError | None = None
        self.hide: Callable[[], None] = lambda: None
        self._outlives_stdout = outlives_stdout

    @cached_property
    def messages(self) -> Console:
        """For progress: stderr."""
        from rich.console import Console

        return Console(stderr=True, highlight=False, markup=False, emoji=False)

    @property
    def draws(self) -> bool:
        """Whether bars may be drawn: stderr is a terminal that can move its cursor, and nobody asked for quiet."""
        if self.quiet or os.environ.get("TERM", "").lower() in ("dumb", "unknown"):
            return False
        try:
            return sys.stderr.isatty()
        except ValueError:  # closed
            return False

    @cached_property
    def _console(self) -> Console:
        from rich.console import Console

        return Console(highlight=False, markup=False, emoji=False)

    def table(self, *rows: RenderableType, style: str | None = None, end: str = "\n") -> None:
        """Tables and styled text to stdout. Text is shown as it is, once it is printable."""
        with self._console.capture() as captured:
            for row in rows:
                self._console.print(printable(row) if isinstance(row, str) else row, style=style, end=end)
        self._write(captured.get())

    def clear(self) -> None:
        """Begin at the top of an empty terminal; nothing where stdout is none."""
        if self._console.is_terminal:
            with self._console.capture() as captured:
                self._console.clear()
            self._write(captured.get())

    def json(self, row: dict[str, Any]) -> None:
        """One JSON object as one line of stdout, flushed so that a reader sees it now."""
        self._write(json_text(row) + "\n")

    def plain(self, text: str, end: str = "\n") -> None:
        """Text to stdout; its lines stay lines."""
        self._write(printable(text, lines=True) + end)

    def note(self, text: str) -> None:
        """One line to stderr, unless `--quiet`."""
        if not self.quiet:
            self.warn(text)

    def warn(self, text: str) -> None:
        """One line to stderr, always."""
        # A terminal that was closed, a pipe that nobody reads: there is nobody to tell.
        with suppress(OSError, ValueError):
            self.hide()
            sys.stderr.write(printable(text) + "\n")
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
    def _warnings(self) -> Iterator[None]:
        with warnings.catch_warnings():
            others = warnings.showwarning

            def show(message: Warning | str, category: type[Warning], *where: Any) -> None:
                if issubclass(category, PositionWarning):
                    self.warn(f"Warning: {message}")
                else:
                    others(message, category, *where)

            warnings.simplefilter("always", PositionWarning)
            warnings.showwarning = show  # type: ignore[assignment]
            yield

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turn an error of the library into `Error:` and `Hint:` and its exit code, a warning into one line."""
        try:
            with self._warnings(), withheld_stdin() as self.stdin:
                yield
                self._end()
        except _StdoutLost:
            self._end()
        except ProtoKVError as error:
            if self.debug:
                traceback.print_exc()
            self.warn(f"Error: {' '.join(error.message.split())}")
            if error.hint:
                self.warn(f"Hint: {' '.join(error.hint.split())}")
            self._notes(error)
            raise typer.Exit(exit_code(error)) from error
        except (KeyboardInterrupt, typer.Exit):
            raise
        except Exception as error:
            if self.debug:
                raise
            self.warn(f"Error: {type(error).__name__}: {' '.join(str(error).split()) or 'no message'}")
            self.warn("Hint: run again with --debug for the traceback; it looks like a bug of protokv")
            self._notes(error)
            raise typer.Exit(Exit.FAILURE) from error

    def _notes(self, error: Exception) -> None:
        for note in getattr(error, "__notes__", ()):
            self.warn(f"Note: {note}")

    def _end(self) -> None:
        """A reader who has left is content; a full disk is not."""
        if self.lost is not None and not isinstance(self.lost, BrokenPipeError):
            self.warn(f"Error: stdout cannot be written: {self.lost.strerror}")
            self.warn("Hint: make room there, or write to another place, and run the command again")
            raise typer.Exit(Exit.FAILURE)


class _StdoutLost(Exception):
    """What a command had to say cannot be written, and there is nothing else for it to do."""
