"""`protokv ingest` of several live sources: one process watches them, and each has its state."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import typer

from protokv.fleet.plan import list_video_jobs, locate_fleet_state
from protokv.ingestion import IngestEvent, IngestOptions, events, ingest_together
from protokv.state.commit import explain_write_errors
from protokv.state.store import is_remote_state
from protokv.texts import format_count
from protokv.video.address import name_source
from protokv_cli.exits import ExitCode
from protokv_cli.ingest_fleet import check_place
from protokv_cli.ingest_report import name_event, note_news, note_start, show_query_hint
from protokv_cli.output import (
    Output,
    ProgressBar,
    explain_error,
    format_bytes,
    format_time,
    tabulate_rows,
)
from protokv_cli.process import handle_signals


def ingest_live(out: Output, sources: dict[str, str], place: str, chosen: IngestOptions) -> None:
    """Watch live sources into the folder `place` until they end or the user stops; end with the
    exit code of the signal, or 3 if one of them failed. `sources` are what is opened, by what the
    user named.
    """
    check_place(place)
    jobs = list_video_jobs(sources, live=True)
    if not is_remote_state(place):
        with explain_write_errors(Path(place)):
            Path(place).mkdir(parents=True, exist_ok=True)
    states = {locate_fleet_state(place, job.key): job.source for job in jobs}
    opened = {state: sources[source] for state, source in states.items()}
    with (
        handle_signals(out.note) as stop,
        _Report(out, len(states)) as report,
        # Closing it commits what was watched if something fails here.
        closing(ingest_together(opened, chosen, lambda: bool(stop))) as found,
    ):
        for state, event in found:
            report.follow(name_source(states[state]), event)
    report.end()
    if stop.exit is not None:
        out.note(f"stopped; the states in {place} are committed. Continue with the same command.")
        raise typer.Exit(stop.exit)
    if report.failures:
        raise typer.Exit(ExitCode.PARTIAL)
    show_query_hint(out, ["--state", place], report.model, chosen.backbone)


class _Report(ProgressBar):
    """Shows the events of several sources, and how far they are together."""

    def __init__(self, out: Output, n: int) -> None:
        """Show nothing yet, of so many sources."""
        super().__init__(out, "loading model", format_count(n, "source"), logs=not out.as_json)
        self.model: str | None = None
        self.failures = 0
        self._ends: list[dict[str, object]] = []
        self._last: dict[str, events.IngestProgress] = {}

    def follow(self, source: str, event: IngestEvent | Exception) -> None:
        """Show an event of a source, or why it ended."""
        out = self._out
        if isinstance(event, Exception):
            self._fail(source, event)
            return
        if isinstance(event, events.IngestStarted):
            if self.model is None:
                out.note_model(event.model, event.notice)
            self.model = event.model
            note_start(out, event, source)
        note_news(out, event, source)
        if isinstance(event, events.IngestProgress) and not self._show_progress(source, event):
            return
        row = {"type": name_event(event), "source": source, **asdict(event)}
        if out.as_json:
            out.json(row)
        if isinstance(event, events.IngestSummary):
            self._last.pop(source, None)
            names = ("source", "state", "stream_time_s", "steps", "file_bytes")
            self._ends.append({name: row[name] for name in names})
            if why := event.damaged and event.damage:
                self.failures += 1
                out.error(f"Error: {source}: {why}")

    def end(self) -> None:
        """Show a table of what came of the sources."""
        if not self._out.as_json and self._ends:
            self._out.table(tabulate_rows(list(self._ends[0]), self._ends))

    def _fail(self, source: str, error: Exception) -> None:
        self.failures += 1
        self._last.pop(source, None)
        message, hint, code = explain_error(error)
        # Most messages name the source themselves.
        named = message if source in message else f"{source}: {message}"
        self._out.tell_failure(named, hint)
        if self._out.as_json:
            row = {"type": "failed", "source": source, "error": type(error).__name__}
            self._out.json({**row, "message": message, "hint": hint, "exit_code": int(code)})

    def _show_progress(self, source: str, event: events.IngestProgress) -> bool:
        """Draw the bar; return True if a JSON line of this source is due."""
        self._last[source] = event
        if self.due():
            last = self._last.values()
            self.show(
                [
                    format_time(max(one.stream_time_s for one in last)),
                    f"{sum(one.frames_per_second for one in last):.0f} frames/s",
                    f"{len(last)} watched",
                    f"states {format_bytes(sum(one.state_bytes for one in last))}",
                ],
                0,
                None,
            )
        return self.row_due(source)
