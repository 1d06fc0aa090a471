r"""The streams of a command: results to stdout, messages, progress and errors to stderr.

Results are records: tables for people, one JSON object a line for programs. Without `--format`, a
terminal gets tables and a pipe gets JSON. If stderr is closed, messages are dropped. If stdout is
closed, a command that writes a state goes on, and any other one ends.

A file name, a state, a video or a model can hold escape sequences, controls and marks that turn the
direction of writing. Every text that this program writes passes `make_printable` or `format_json`:
it is shown, never obeyed. Characters that are not printable are written as their escapes, `\x1b`.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
import traceback
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Self

import typer

from protokv.errors import PositionWarning, ProtoKVError, escape_text, format_os_error
from protokv.machine import is_out_of_memory
from protokv.texts import JsonObject, shorten_text
from protokv_cli.exits import ExitCode, find_exit_code

if TYPE_CHECKING:
    from rich.console import RenderableType

    from protokv.timings import Timings

Row = Mapping[str, Any]
_MOST_CHARACTERS = 2000  # of a message: what a user or a file gave may be in it
_LEAST_TEXT = 20  # columns of a terminal for a text; a longer word may be folded
_PADDING = 2  # of a column of a table
# drawing at every step of a small model would take as long as the model
_ROW_EVERY_S = 1.0  # readers of the lines want to follow a run, not every step
_BAR_EVERY_S = 0.25
LOG_EVERY_S = 10.0
# they join letters in Persian, Indic scripts and emoji, and direct nothing
_JOINERS = frozenset("\u200c\u200d")


class Output:
    """The streams of one command."""

    def __init__(
        self,
        *,
        as_json: bool | None = None,
        quiet: bool = False,
        debug: bool = False,
        outlives_stdout: bool = False,
    ) -> None:
        """Write JSON or tables; None: tables to a terminal. Go on after stdout is lost if it
        `outlives_stdout`.
        """
        self.as_json = not sys.stdout.isatty() if as_json is None else as_json
        self.quiet = quiet
        self.debug = debug
        # Why nothing more is written to stdout.
        self._lost: Exception | None = None
        # Takes a bar off the terminal, so that a line can be written in its place.
        self.hide: Callable[[], None] = lambda: None
        self._outlives_stdout = outlives_stdout
        self._told = set[str]()

    @property
    def draws(self) -> bool:
        """Whether bars are drawn: stderr is a terminal that can move its cursor, and not
        `--quiet`.
        """
        return (
            not self.quiet
            and sys.stderr.isatty()
            and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")
        )

    def table(self, *parts: RenderableType) -> None:
        """Write tables and text to stdout."""
        from rich.console import Console

        console = Console(highlight=False, markup=False, emoji=False)
        with console.capture() as captured:
            for part in parts:
                console.print(make_printable(part) if isinstance(part, str) else part)
        self._write(captured.get())

    def json(self, row: Row) -> None:
        """Write one JSON object as one line of stdout, and flush."""
        self._write(format_json(row) + "\n")

    def text(self, text: str, end: str = "\n") -> None:
        """Write text to stdout; its lines stay lines."""
        self._write(make_printable(text, lines=True) + end)

    def record(self, row: Row, title: str = "") -> None:
        """Write one record: as JSON, or as a table of its fields without those that are empty."""
        self.show([row], lambda rows: [tabulate_fields(row, title) for row in rows])

    def show(
        self, rows: Iterable[Row], tables: Callable[[Iterable[Row]], Iterable[RenderableType]]
    ) -> None:
        """Write records to stdout: as JSON as they come, or as `tables` shows them."""
        if not self.as_json:
            self.table(*tables(rows))
        else:
            for row in rows:
                self.json(row)

    def note(self, text: str, *, once: bool = False) -> None:
        """Write a note or a warning to stderr, unless `--quiet`."""
        if not self.quiet:
            self.error(text, once=once)

    def note_model(self, name: str | None, notice: str = "") -> None:
        """Say in a line what a model cannot read, and how to name another one in place of an
        embedded one.
        """
        if is_embedded_model(name):
            notice = (
                "the embedded model reads drawn shapes only. For other videos: protokv ingest "
                "VIDEO --model "
            )
            notice += "llava-hf/llava-onevision-qwen2-0.5b-ov-hf (protokv models lists more)"
        if notice:
            self.note(f"Note: {notice}", once=True)

    def error(self, text: str, *, once: bool = False) -> None:
        """Write a line to stderr, or `once`."""
        if once and text in self._told:
            return
        self._told |= {text} if once else set()
        # The terminal may be closed, or nobody may read the pipe.
        with suppress(OSError, ValueError):
            self.hide()
            sys.stderr.write(shorten_text(make_printable(text), _MOST_CHARACTERS) + "\n")
            sys.stderr.flush()

    def _write(self, text: str) -> None:
        if self._lost is not None:
            return
        try:
            if sys.stdout.isatty():
                self.hide()
            sys.stdout.write(text)
            sys.stdout.flush()
        except OSError as error:
            # Python would complain once more when it flushes stdout at exit.
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            hint = "make room there, or write to another place, and run the command again"
            self._lost = ProtoKVError(f"stdout cannot be written: {error.strerror}", hint=hint)
            if isinstance(error, BrokenPipeError):
                # A reader who leaves is no failure.
                self._lost = typer.Exit()
            if not self._outlives_stdout:
                raise self._lost from error

    def tell_failure(self, message: str, hint: str | None) -> None:
        """Write an error and what to do about it, a line each, once."""
        self.error(f"Error: {' '.join(message.split())}", once=True)
        if hint:
            self.error(f"Hint: {' '.join(hint.split())}", once=True)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turn an error into `Error:`, `Hint:` and its exit code, and a warning of the library into
        one line.
        """
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("always", PositionWarning)
                warnings.showwarning = lambda message, *_, **__: self.note(f"Warning: {message}")
                yield
            if self._lost is not None:
                raise self._lost
        except typer.Exit:
            raise
        except Exception as error:
            if self.debug:
                traceback.print_exc()
            message, hint, code = explain_error(error)
            self.tell_failure(message, hint)
            for note in getattr(error, "__notes__", ()):
                self.error(f"Note: {note}")
            raise typer.Exit(code) from error


def explain_error(error: Exception) -> tuple[str, str | None, ExitCode]:
    """Return what happened, what to do about it, and the exit code."""
    if isinstance(error, ProtoKVError):
        return error.message, error.hint, find_exit_code(error)
    if is_out_of_memory(error):
        what = "there is not enough memory, or the limit of this process is too low (ulimit -v)"
        hint = "free some memory, raise the limit, or use a smaller budget or model"
    elif isinstance(error, OSError) and error.filename is not None:
        what = f"{escape_text(error.filename)}: {format_os_error(error)}"
        hint = "mend what the system refuses and run it again; --debug shows the traceback"
    else:
        what = f"{type(error).__name__}: {str(error).strip() or 'no message'}"
        hint = "run again with --debug for the traceback; it looks like a bug of protokv"
    return what, hint, ExitCode.FAILURE


def is_embedded_model(name: str | None) -> bool:
    """Return whether a model is an embedded one; None is the default, which is."""
    return name is None or name.startswith("protokv/")


def make_printable(text: object, *, lines: bool = False) -> str:
    """Return `str(text)` without control, format, private and unpaired characters; `lines` keeps
    feeds and tabs.
    """
    kept = "\n\t" if lines else ""

    def show(c: str) -> str:
        # Python calls every space but " " unprintable.
        if c.isprintable() or c in kept or c in _JOINERS or unicodedata.category(c) == "Zs":
            return c
        return c.encode("unicode_escape", "surrogatepass").decode("ascii")

    shown = str(text)
    return shown if shown.isprintable() else "".join(map(show, shown))


def format_json(value: Any) -> str:
    r"""Return JSON on one line, in ASCII: other characters are `\uXXXX`, in every encoding."""
    return json.dumps(value, allow_nan=False)


def format_bytes(n: float) -> str:
    """Return a size such as `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


def format_time(seconds: float) -> str:
    """Return a time such as `0:12.5`, `10:00` or `1:02:03`; every option that takes a time reads it
    back.
    """
    tenths = round(seconds * 10)
    whole, tenth = divmod(tenths, 10)
    hours = whole // 3600
    minutes = whole // 60 % 60
    rest = whole % 60
    text = f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
    return f"{text}.{tenth}" if tenth else text


def _format_cell(name: str, value: Any) -> str:
    """Return a value as a person reads it; its name tells of times (`length_s`) and sizes
    (`file_bytes`).
    """
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list) and value and "quantiles" in name:
        # The least, the median and the greatest.
        return " / ".join(f"{value[i]:g}" for i in (0, len(value) // 2, -1))
    if isinstance(value, str | list | tuple):
        return make_printable(
            value if isinstance(value, str) else ", ".join(map(str, value)) or "-"
        )
    if name.endswith(("bytes", "_s")):
        return format_bytes(value) if name.endswith("bytes") else format_time(value)
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def tabulate_fields(row: Row, title: str = "") -> RenderableType:
    """Return a table of the fields of one record and of those in it, without rules, its `type` and
    empty ones.
    """
    from rich.table import Table

    table = Table(show_header=False, box=None)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")

    def add(part: Row, inside: str = "") -> None:
        for name, value in part.items():
            if isinstance(value, Mapping):
                add(value, f"{inside}{_heading(name)} ")
            elif value not in (None, "", [], ()) and name != "type":
                table.add_row(inside + _heading(name), _format_cell(name, value))

    add(row)
    return _titled(title, table)


def tabulate_rows(names: Sequence[str], rows: Iterable[Row], title: str = "") -> RenderableType:
    """Return a table of records with a header. Text is shown whole, in more lines if need be;
    numbers stand right, and none is cut. Columns without room are a table below.
    """
    from rich.cells import cell_len
    from rich.console import Group
    from rich.table import Table

    rows = list(rows)
    table = Table(box=None, header_style="cyan")
    columns = list[list[str]]()
    room = shutil.get_terminal_size().columns
    for name in names:
        cells = [_format_cell(name, row[name]) for row in rows]
        is_text = not columns or any(isinstance(row[name], str) for row in rows)
        needed = max(map(cell_len, (_heading(name), *cells)))
        # rich folds the widest texts, down to this width if need be.
        room -= _PADDING + (min(needed, _LEAST_TEXT) if is_text else needed)
        if room < 0 and len(columns) > 1:
            break
        columns.append(cells)
        table.add_column(
            _heading(name),
            overflow="fold",
            no_wrap=not is_text,
            justify="left" if is_text else "right",
        )
    for texts in zip(*columns, strict=True):
        table.add_row(*texts)
    shown = _titled(title, table)
    if len(columns) == len(names):
        return shown
    return Group(shown, "", tabulate_rows([names[0], *names[len(columns) :]], rows))


def _heading(name: str) -> str:
    return make_printable(name.removesuffix("_s").replace("_", " "))


def _titled(title: str, table: RenderableType) -> RenderableType:
    # A rich table wraps its own title to the width of the table.
    from rich.console import Group
    from rich.text import Text

    return Group(Text(make_printable(title), style="bold"), table) if title else table


class ProgressBar:
    """A name, a bar and a text in one line of the terminal; a context manager that takes it off
    again.

    Every other line that is written to the terminal hides the bar (`Output.hide`); the next `show`
    draws it again.
    """

    def __init__(self, out: Output, text: str, name: str = "", *, logs: bool = True) -> None:
        """Draw it with a first text and the name of the work; with `logs`, write notes if no bar
        can be drawn.
        """
        self._out = out
        self._name = name
        self._draws = out.draws
        self._is_drawn = False
        self._pause_s = _BAR_EVERY_S if self._draws else LOG_EVERY_S if logs else math.inf
        self._shown_s = -math.inf if self._draws else time.monotonic()
        self._row_s = dict[str, float]()  # when each source had its last row of JSON
        if self._draws:
            out.hide = self.stop
            self.show([text], 0, None)

    def due(self) -> bool:
        """Return True, once, when it is time to call `show` again."""
        now_s = time.monotonic()
        is_due = now_s - self._shown_s >= self._pause_s
        self._shown_s = now_s if is_due else self._shown_s
        return is_due

    def row_due(self, source: str = "") -> bool:
        """Return True if it is time for another row of JSON about a source."""
        now_s = time.monotonic()
        is_due = self._out.as_json and now_s - self._row_s.get(source, -math.inf) >= _ROW_EVERY_S
        if is_due:
            self._row_s[source] = now_s
        return is_due

    def show(self, parts: Sequence[str], done: float, total: float | None) -> None:
        """Show the parts of a text, the most important first, and the share `done` of `total`;
        None: no end.
        """
        name = f"{self._name}: " if self._name else ""
        if not self._draws:
            self._out.note(name + ", ".join(part.strip() for part in parts))
            return
        from rich.cells import set_cell_size

        bar = f"[{'#' * int(20 * done / total):20}] " if total else ""
        text = make_printable(f"{self._name[-30:]} {bar}{'  '.join(parts)}".strip())
        # What has no room on the right is left out. Characters may be two columns wide.
        self._write(set_cell_size(text, shutil.get_terminal_size().columns - 1).rstrip())

    def stop(self, *_: object) -> None:
        """Take the bar off the terminal."""
        if self._is_drawn:
            self._write("")

    def __enter__(self) -> Self:
        return self

    __exit__ = stop

    def _write(self, text: str) -> None:
        self._is_drawn = bool(text)
        # The terminal may be gone.
        with suppress(OSError, ValueError):
            sys.stderr.write(f"\r\x1b[2K{text}")
            sys.stderr.flush()


def format_time_left(done: float, left: float, elapsed_s: float) -> list[str]:
    """Return the time that the rest takes at the speed until now; nothing if that is unknown."""
    return [f"{format_time(math.ceil(max(0.0, left) * elapsed_s / done))} left"] if done > 0 else []


def round_timings(timings: Timings) -> JsonObject:
    """Return the seconds of each stage for JSON, with the CPU time of the process, and which parts
    graphs ran.
    """
    seconds = timings.seconds | {"process cpu": time.process_time()}
    found: JsonObject = {name: round(value, 4) for name, value in seconds.items()}
    return found | ({"graphs": timings.graphs} if timings.graphs else {})


def show_timings(out: Output, timings: Row) -> None:
    """Write a line to stderr for each stage that `round_timings` gives, and for each part that a
    graph can run.
    """
    for name, value in timings.items():
        for part, how in value.items() if name == "graphs" else [(name, f"{value:9.3f} s")]:
            out.error(f"{part:<16}  {how}")
