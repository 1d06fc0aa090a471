"""Numbers and rows for people: bytes, times, and two kinds of rich tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from protokv_cli.printable import printable

if TYPE_CHECKING:
    from rich.console import RenderableType


def bytes_text(n: float) -> str:
    """`1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


def time_text(seconds: float) -> str:
    """`0:12.5`, `10:00`, `1:02:03`, to the tenth of a second; `--at` and every other option of a time reads it."""
    tenths = round(seconds * 10)
    whole, tenth = divmod(tenths, 10)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    text = f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
    return f"{text}.{tenth}" if tenth else text


def count_text(n: int, what: str) -> str:
    """`1 step`, `12,000 steps`."""
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"


def pairs(rows: Mapping[str, Any], title: str = "") -> RenderableType:
    """A table of names and values without rules."""
    from rich.table import Table

    table = Table(show_header=False, box=None)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(printable(name), printable(value))
    return _titled(title, table)


def grid(columns: Iterable[str], rows: Iterable[Iterable[Any]], title: str = "") -> RenderableType:
    """A table with a header; every column but the first is a number and stands to the right."""
    from rich.table import Table

    table = Table(box=None, header_style="cyan")
    for i, column in enumerate(columns):
        table.add_column(printable(column), justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*(f"{cell:.3g}" if isinstance(cell, float) else printable(cell) for cell in row))
    return _titled(title, table)


def _titled(title: str, table: RenderableType) -> RenderableType:
    """The title on a line of its own: a table's own title is wrapped to the width of the table."""
    from rich.console import Group
    from rich.text import Text

    return Group(Text(printable(title), style="bold"), table) if title else table
