"""A replay as its user sees it: progress on stderr, then a table or JSON, a CSV file and a figure."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from protokv.errors import ConfigError
from protokv.replay.plan import Plan, UnreadableVideo
from protokv.replay.report import summarise
from protokv.replay.rows import AnswerRow
from protokv.replay.runner import StreamProgress
from protokv.replay.tables import save_points, tabulate
from protokv_cli.output import Format, Output, format_time, grid, pairs
from protokv_cli.progress import Bar, format_time_left


class ReplayBar(Bar):
    """Takes each event of a replay and shows its progress; unreadable videos are told and added to `unread`."""

    def __init__(self, out: Output, plan: Plan, done: Collection[str], unread: MutableMapping[str, str]) -> None:
        left = {stream.name: [one.ask.at_s for one in asked if one.key not in done] for stream, asked in plan.asked}
        self._answers, self._given, self._unread = sum(map(len, left.values())), 0, unread
        # Time goes by with the steps that are watched, up to the last question of each video.
        self._until_s = {name: max(times, default=0.0) for name, times in left.items()}
        self._watched_s, self._began_s = dict[str, float](), time.monotonic()
        super().__init__(out, f"0 of {self._answers} answers")

    def follow(self, event: AnswerRow | StreamProgress | UnreadableVideo) -> None:
        """Show an event."""
        if isinstance(event, UnreadableVideo):
            self._until_s[event.video] = self._watched_s.get(event.video, 0.0)
            self._unread[event.video] = event.error.message
            self._out.error(f"left out: {event.video}: {event.error.message}")
        elif isinstance(event, AnswerRow):
            self._given += 1
        else:
            self._watched_s[event.video] = min(event.stream_time_s, self._until_s[event.video])
            if self.due():
                done, total = sum(self._watched_s.values()), sum(self._until_s.values())
                left = format_time_left(done, total - done, time.monotonic() - self._began_s)
                where = f"{event.video} {format_time(event.stream_time_s)} / {format_time(event.length_s)}"
                self.show([f"{self._given} of {self._answers} answers", *left, where], done, total)


def show_report(
    out: Output,
    rows: Sequence[AnswerRow],
    *,
    left_out: Mapping[str, Any] | None = None,
    missing: Mapping[str, str] | None = None,
    plot: Path | None = None,
    table: Path | None = None,
) -> None:
    """Show a table on a terminal, one JSON document in a pipe, and write the files that were asked for."""
    if not rows:
        reasons = "; ".join(f"{why}: {n}" for why, n in (left_out or {}).items())
        raise ConfigError(
            f"there is nothing to show: no question could be asked ({reasons or 'none was there'})",
            hint="try shorter --delays, a longer stream, --no-intersection, or --types all",
        )
    report = summarise(rows)
    report["missing"] = dict(missing or {})
    report["facts"] |= {name: str(value) for name, value in (left_out or {}).items()}
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


def name_left_out(dropped: Mapping[str, int], missing: Mapping[str, str], notes: Mapping[str, int]) -> dict[str, Any]:
    """Return why questions and videos are not in the results, for the facts of a report."""
    found: dict[str, Any] = {f"left out, {why}": n for why, n in dropped.items()}
    return found | {f"left out, video {name}": why for name, why in missing.items()} | dict(notes)
