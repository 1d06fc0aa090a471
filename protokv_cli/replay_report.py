"""A replay as its user sees it: progress on stderr, then a table or JSON, a CSV file and a figure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from protokv.errors import ConfigError
from protokv.replay.dataset import OpenedStreams
from protokv.replay.judges import Judge, judge_rows
from protokv.replay.plan import UnreadableVideo
from protokv.replay.report import summarise
from protokv.replay.rows import AnswerRow, RowFile
from protokv.replay.runner import StreamProgress
from protokv.replay.tables import save_points, tabulate
from protokv_cli.output import Format, Output
from protokv_cli.progress import Bar, format_time_left
from protokv_cli.tables import format_time, grid, pairs


@contextmanager
def show_progress(
    out: Output, answers: int, unread: MutableMapping[str, str]
) -> Iterator[Callable[[AnswerRow | StreamProgress | UnreadableVideo], None]]:
    """Return a function that takes each event of a replay and shows its progress.

    Unreadable videos are reported at once and added to `unread`.
    """
    bar, given, began_s = Bar(out, f"0 of {answers} answers"), 0, time.monotonic()

    def follow(event: AnswerRow | StreamProgress | UnreadableVideo) -> None:
        nonlocal given
        if isinstance(event, UnreadableVideo):
            unread[event.video] = event.error.message
            out.error(f"left out: {event.video}: {event.error.message}")
        elif isinstance(event, AnswerRow):
            given += 1
        elif bar.due():
            left = format_time_left(given, answers - given, time.monotonic() - began_s)
            where = f"{event.video} {format_time(event.stream_time_s)} / {format_time(event.length_s)}"
            bar.show([f"{given} of {answers} answers", *left, where], given, answers)

    with bar:
        yield follow


def judge_answers(
    out: Output, results: RowFile, keys: Sequence[str], judge: Judge, should_stop: Callable[[], bool]
) -> None:
    """Judge open answers, and report the number without a verdict."""
    without = 0
    for row in judge_rows(results, keys, judge):
        without += row is None
        if should_stop():
            return
    if without:
        out.error(f"{without} answers have no verdict of {judge.label}; run the same command again to ask for them")


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
    left_out = {f"left out, {why}": str(n) for why, n in (dropped or {}).items()}
    left_out |= {f"left out, video {name}": why for name, why in report["missing"].items()}
    report["facts"] |= left_out | {note: str(n) for note, n in (notes or {}).items()}
    if out.format is Format.JSON:
        out.json(report)
    else:
        found = tabulate(report)
        out.table(pairs(report["facts"]), "", grid(found.head, found.rows), found.note)
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
    rows |= {f"left out, {why}": n for why, n in cost["dropped"].items()}
    rows |= {f"left out, video {name}": why for name, why in opened.missing.items()}
    rows |= dict(opened.notes)
    out.table(pairs(rows, title="plan: hours of video, and answers to give over all memories"))
