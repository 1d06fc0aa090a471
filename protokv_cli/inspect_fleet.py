"""`protokv inspect DIR/`: one table over a fleet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from protokv_cli.output import Format, Output
from protokv_cli.tables import bytes_text, grid, pairs, time_text

if TYPE_CHECKING:
    from rich.console import RenderableType


def inspect_fleet(out: Output, place: str) -> None:
    """A row per state, and per video that has none."""
    from protokv.fleet.survey import survey

    rows: list[dict[str, Any]] = []
    for row in survey(place):
        if out.format is Format.JSON:
            out.json(row)
        elif out.format is Format.PLAIN:
            out.plain("\t".join("" if value is None else str(value) for value in row.values()))
        else:
            rows.append(row)
    for table in _tables(rows, place.rstrip("/") + "/") if rows else ():
        out.table(table)


def _tables(rows: list[dict[str, Any]], root: str) -> Iterator[RenderableType]:
    columns = ("state", "stream", "steps", "size", "complete", "what is wrong")
    yield grid(columns, (_cells(row, root) for row in rows))
    whole = sum(row["complete"] and not row["damage"] for row in rows)
    seconds, size = (sum(row[name] or 0 for row in rows) for name in ("stream_time_s", "file_bytes"))
    total = f"{len(rows)}: {whole} whole, {len(rows) - whole} not"
    yield pairs({"videos": total, "watched": time_text(seconds), "states": bytes_text(size)})


def _cells(row: dict[str, Any], root: str) -> tuple[Any, ...]:
    known = row["steps"] is not None
    return (
        row["state"].removeprefix(root),
        time_text(row["stream_time_s"]) if known else "-",
        row["steps"] if known else "-",
        bytes_text(row["file_bytes"]) if known else "-",
        "yes" if row["complete"] else "no",
        row["failure"] or row["damage"] or "",
    )
