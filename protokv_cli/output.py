"""Where results, messages and errors go.

Data goes to stdout in one of three formats: `table` for people, `json` (one object a line) for programs, `plain` for
shells. Everything else goes to stderr. Without `--format`, stdout decides: a terminal gets tables, a pipe gets JSON.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

import typer

from protokv.errors import PositionWarning, ProtoKVError
from protokv_cli.exits import Exit, exit_code

if TYPE_CHECKING:
    from rich.console import Console


class Format(StrEnum):
    """How results are written to stdout."""

    AUTO = "auto"
    TABLE = "table"
    JSON = "json"
    PLAIN = "plain"


class Output:
    """The streams of one command."""

    def __init__(self, fmt: Format, *, as_json: bool, quiet: bool, debug: bool) -> None:
        """Resolve the format once; `--json` wins over `--format`."""
        chosen = Format.JSON if as_json else fmt
        if chosen is Format.AUTO:
            chosen = Format.TABLE if sys.stdout.isatty() else Format.JSON
        self.format = chosen
        self.quiet = quiet
        self.debug = debug

    @cached_property
    def console(self) -> Console:
        """For tables: stdout."""
        from rich.console import Console

        return Console(highlight=False)

    @cached_property
    def messages(self) -> Console:
        """For progress and notes: stderr."""
        from rich.console import Console

        return Console(stderr=True, highlight=False)

    def json(self, row: dict[str, Any]) -> None:
        """One JSON object as one line of stdout, flushed so that a reader sees it now."""
        sys.stdout.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
        sys.stdout.flush()

    def plain(self, text: str, end: str = "\n") -> None:
        """Text to stdout, as it is."""
        sys.stdout.write(text + end)
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """One line to stderr, unless `--quiet`."""
        if not self.quiet:
            self.warn(text)

    def warn(self, text: str) -> None:
        """One line to stderr, always."""
        sys.stderr.write(text + "\n")
        sys.stderr.flush()

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
            with self._warnings():
                yield
        except ProtoKVError as error:
            if self.debug:
                traceback.print_exc()
            self.warn(f"Error: {' '.join(error.message.split())}")
            if error.hint:
                self.warn(f"Hint: {' '.join(error.hint.split())}")
            raise typer.Exit(exit_code(error)) from error
        except BrokenPipeError:
            # The reader has left. Python would complain once more when it flushes stdout at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(Exit.DONE) from None
        except (KeyboardInterrupt, typer.Exit):
            raise
        except Exception as error:
            if self.debug:
                raise
            self.warn(f"Error: {type(error).__name__}: {' '.join(str(error).split()) or 'no message'}")
            self.warn("Hint: run again with --debug for the traceback; it looks like a bug of protokv")
            raise typer.Exit(Exit.FAILURE) from error
