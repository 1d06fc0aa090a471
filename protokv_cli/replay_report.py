"""A replay as its user sees it: progress on stderr, then a table or JSON, a CSV file and a figure."""

from __future__ import annotations

import time
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from protokv.errors import ConfigError
from protokv.replay.dataset import OpenedStreams
from protokv.replay.plan import UnreadableVideo
from protokv.replay.report import summarise
from protokv.replay.rows import AnswerRow
from protokv.replay.runner import StreamProgress
from protokv.replay.tables import save_points, tabulate
from protokv_cli.output import Format, Output, format_time, grid, pairs
from protokv_cli.progress import Bar, format_time_left


class ReplayBar(Bar):
    """Takes each event of a replay and shows its progress; unreadable videos are told and added to `unread`."""

    def __init__(self, out: Output, answers: int, unread: MutableMapping[str, str]) -> None:
        super().__init__(out, f"0 of {answers} answers")
        self._answers, self._unread, self._given, self._began_s = answers, unread, 0, time.monotonic()

    def follow(self, event: AnswerRow | StreamProgress | UnreadableVideo) -> None:
        """Show an event."""
        if isinstance(event, UnreadableVideo):
            self._unread[event.video] = event.error.message
            self._out.error(f"left out: {event.video}: {event.error.message}")
        elif isinstance(event, AnswerRow):
            self._given += 1
        elif self.due():
            left = format_time_left(self._given, self._answers - self._given, time.monotonic() - self._began_s)
            where = f"{event.video} {format_time(event.stream_time_s)} / {format_time(event.length_s)}"
            self.show([f"{self._given} of {self._answers} answers", *left, where], self._given, self._answers)


def show_report(
    out: Output,
    rows: Sequence[AnswerRow],
    *,
    dropped: Mapping[str, int] | None = None,
    plot: Path | None = None,
    table: Path | None = None,
    missing: Mapping[str, str] | None = None,
    notes: Mapping[str, int] | None = None,
) -> None:
    """Show a table on a terminal, one JSON document in a pipe, and write the files that were asked for."""
    if not rows:
        reasons = "; ".join(f"{n} {why}" for why, n in (dropped or {}).items())
        raise ConfigError(
            f"there is nothing to show: no question could be asked ({reasons or 'none was there'})",
            hint="try shorter --delays, a longer stream, --no-intersection, or --types all",
        )
    report = summarise(rows)
    report["missing"] = dict(missing or {})
    report["facts"] |= {name: str(value) for name, value in _left_out(dropped, missing, notes).items()}
    if out.format is Format.JSON:
        out.json(report)
    else:
        found = tabulate(report)
        cells = [dict(zip(found.head, row, strict=True)) for row in found.rows]
        out.table(pairs(report["facts"]), "", grid(found.head, cells), found.note)
    if table:
        save_points(report, table)
        out.note(f"numbers: {table}")
    if plot:
        from protokv.replay.figure import save_figure

        save_figure(report, plot)
        out.note(f"figure: {plot}")


def show_cost(out: Output, cost: Mapping[str, Any], opened: OpenedStreams) -> None:
    """Show the cost of a run."""
    if out.format is Format.JSON:
        out.json({"type": "plan", **cost, "missing": opened.missing, "notes": dict(opened.notes)})
        return
    rows = {name: cost[name] for name in ("videos", "memories", "questions", "hours", "answers")}
    rows |= _left_out(cost["dropped"], opened.missing, opened.notes)
    out.table(pairs(rows, title="plan: hours of video, and answers to give over all memories"))


def _left_out(
    dropped: Mapping[str, int] | None, missing: Mapping[str, str] | None, notes: Mapping[str, int] | None
) -> dict[str, Any]:
    found: dict[str, Any] = {f"left out, {why}": n for why, n in (dropped or {}).items()}
    return found | {f"left out, video {name}": why for name, why in (missing or {}).items()} | dict(notes or {})
