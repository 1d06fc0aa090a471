r"""Text for people and programs: printable text, numbers, times, two kinds of rich tables, JSON lines.

A file name, a state, a video or a model can hold escape sequences, controls and marks that turn the direction of
writing. Every text that this program writes passes `make_printable` or `format_json`: it is shown, never obeyed.
Characters that are not printable are written as their escapes, `\x1b`.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

# Formats that join letters in Persian, Indic scripts and emoji, and direct nothing.
_JOINERS = frozenset("\u200c\u200d")
_LINES = frozenset("\n\t")


def make_printable(text: object, *, lines: bool = False) -> str:
    """Return `str(text)` without control, format, private and unpaired characters; `lines` keeps feeds and tabs."""
    found = str(text)
    if found.isascii() and found.isprintable():
        return found
    return "".join(c if _is_shown(c) or (lines and c in _LINES) else _escape(c) for c in found)


def format_json(value: Any) -> str:
    r"""Return JSON on one line; characters that are not printable become `\uXXXX`."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if _is_shown(c) else json.dumps(c)[1:-1] for c in text)


def _is_shown(c: str) -> bool:
    # Python calls every space but " " unprintable.
    return c.isprintable() or c in _JOINERS or unicodedata.category(c) == "Zs"


def _escape(c: str) -> str:
    return c.encode("unicode_escape", "surrogatepass").decode("ascii")


def format_bytes(n: float) -> str:
    """Return a size such as `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


def format_time(seconds: float) -> str:
    """Return a time such as `0:12.5`, `10:00` or `1:02:03`; every option that takes a time reads it back."""
    tenths = round(seconds * 10)
    whole, tenth = divmod(tenths, 10)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    text = f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
    return f"{text}.{tenth}" if tenth else text


def pairs(rows: Mapping[str, Any], title: str = "") -> RenderableType:
    """Return a table of names and values without rules."""
    from rich.table import Table

    table = Table(show_header=False, box=None)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(make_printable(name), make_printable(value))
    return _titled(title, table)


def grid(
    columns: Iterable[str], rows: Iterable[Iterable[Any]], title: str = "", *, left: Collection[str] = ()
) -> RenderableType:
    """Return a table with a header; the first column and those in `left` hold names, which are shown whole.

    The others are aligned to the right, and None is a dash. Where the names leave no room, they go on in the next line.
    """
    from rich.table import Table

    table = Table(box=None, header_style="cyan")
    for i, column in enumerate(columns):
        if i == 0 or column in left:
            table.add_column(make_printable(column), overflow="fold")
        else:
            table.add_column(make_printable(column), justify="right")
    for row in rows:
        table.add_row(*map(_cell_text, row))
    return _titled(title, table)


def _cell_text(cell: Any) -> str:
    if cell is None:
        return "-"
    return f"{cell:.3g}" if isinstance(cell, float) else make_printable(cell)


def _titled(title: str, table: RenderableType) -> RenderableType:
    # A rich table wraps its own title to the width of the table.
    from rich.console import Group
    from rich.text import Text

    return Group(Text(make_printable(title), style="bold"), table) if title else table


def flatten_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield path and value of every field of a JSON document that holds something, for grep and cut."""
    from protokv.state.compare import flatten

    for path, value in flatten(document):
        if value not in ({}, []):
            yield f"{make_printable(path)}\t{make_printable(value)}"
