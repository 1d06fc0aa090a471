"""What `ingest` shows while it runs: a bar on a terminal, JSON lines in a pipe, one line at the end in plain form."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from protokv.ingestion import Event, Progress, Summary
from protokv_cli.output import Format, Output
from protokv_cli.printable import printable
from protokv_cli.tables import bytes_text, time_text

# A reader of the JSON lines wants to follow, not to be flooded; a log file wants a sign of life now and then.
JSON_EVERY_S = 1.0
LOG_EVERY_S = 10.0
# Drawing is not free: at every step of a small model it took as long as the model.
BAR_EVERY_S = 0.25


@contextmanager
def reporting(out: Output, source: str) -> Iterator[Callable[[Event], None]]:
    """A function that takes each event of an ingest and shows it in the chosen format."""
    bar = _Bar(out, source) if out.messages.is_terminal and not out.quiet else None
    pause_s = JSON_EVERY_S if out.format is Format.JSON else LOG_EVERY_S
    last_s = -JSON_EVERY_S if out.format is Format.JSON else time.monotonic()

    def report(event: Event) -> None:
        nonlocal last_s
        if isinstance(event, Progress):
            if bar:
                bar.update(event)
            if time.monotonic() - last_s < pause_s:
                return
            last_s = time.monotonic()
        if out.format is Format.JSON:
            out.json({"type": type(event).__name__.lower(), **asdict(event)})
        elif isinstance(event, Summary):
            if bar:
                bar.stop()
            if out.format is Format.PLAIN:
                out.plain(event.state)
            else:
                _table(out, event)
        elif isinstance(event, Progress) and not bar:
            where, speed = time_text(event.stream_time_s), event.frames_per_second
            out.note(f"{source}: {where}, {speed:.0f} frames/s, state {bytes_text(event.state_bytes)}")

    try:
        yield report
    finally:
        if bar:
            bar.stop()


class _Bar:
    def __init__(self, out: Output, source: str) -> None:
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[where]}  {task.fields[speed]}  {task.fields[state]}", markup=False),
            console=out.messages,
            transient=True,
            auto_refresh=False,
            # Data goes where the user sent it, and lines to stderr hide the bar themselves (`Output.hide`).
            redirect_stdout=False,
            redirect_stderr=False,
        )
        out.hide = self.stop
        self._drawn_s = -BAR_EVERY_S
        self._task = self._bar.add_task(printable(source), total=None, where="", speed="", state="")
        self._gone = False
        self._draw(self._bar.start)

    def update(self, event: Progress) -> None:
        if time.monotonic() - self._drawn_s < BAR_EVERY_S:
            return
        self._drawn_s = time.monotonic()
        end = f" / {time_text(event.duration_s)}" if event.duration_s else ""
        # Something was written meanwhile, and the bar was taken away for it.
        self._draw(self._bar.start)
        self._draw(
            self._bar.update,
            self._task,
            total=event.duration_s,
            completed=min(event.stream_time_s, event.duration_s or event.stream_time_s),
            where=f"{time_text(event.stream_time_s)}{end}",
            speed=f"{event.frames_per_second:.0f} frames/s",
            state=f"state {bytes_text(event.state_bytes)}",
            refresh=True,
        )

    def stop(self) -> None:
        """Take the bar off the terminal; the next update shows it again."""
        self._draw(self._bar.stop)

    def _draw(self, act: Callable[..., object], *arguments: Any, **options: Any) -> None:
        """A terminal that is gone takes the bar with it and nothing else; for a broken pipe rich raises SystemExit."""
        if not self._gone:
            try:
                act(*arguments, **options)
            except (OSError, ValueError, SystemExit):
                self._gone = True


def _table(out: Output, summary: Summary) -> None:
    from protokv_cli.tables import count_text, pairs

    rows: dict[str, Any] = {
        "state": summary.state,
        "stream": ", ".join(
            (
                time_text(summary.watched_s),
                count_text(summary.steps, "step"),
                f"{count_text(summary.tokens_seen, 'token')} seen",
            )
        ),
        "bytes": f"{bytes_text(summary.state_bytes)} of state, {bytes_text(summary.file_bytes)} on disk",
        "took": f"{summary.elapsed_s:.1f} s",
    }
    if not summary.complete:
        rows["incomplete"] = "stopped before the end of the source"
    if summary.damaged:
        rows["damaged"] = summary.damage
    out.table(pairs(rows))
