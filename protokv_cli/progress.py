"""What `ingest` shows while it runs: a bar on a terminal, JSON lines in a pipe, one line at the end in plain form."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from protokv.ingestion import Event, Progress, Summary
from protokv.timings import Timings
from protokv_cli.output import Format, Output
from protokv_cli.printable import printable
from protokv_cli.tables import bytes_text, time_text
from protokv_cli.timings import rounded, show_timings

# A reader of the JSON lines wants to follow, not to be flooded; a log file wants a sign of life now and then.
JSON_EVERY_S = 1.0
LOG_EVERY_S = 10.0
# Drawing is not free: at every step of a small model it took as long as the model.
BAR_EVERY_S = 0.25


@contextmanager
def reporting(out: Output, source: str, timings: Timings | None = None) -> Iterator[Callable[[Event], None]]:
    """A function that takes each event of an ingest and shows it in the chosen format; at the end where time went."""
    bar = _Bar(out, source) if out.draws else None
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
        spent = {"timings": rounded(timings.seconds)} if timings is not None and isinstance(event, Summary) else {}
        if out.format is Format.JSON:
            out.json({"type": type(event).__name__.lower(), **asdict(event), **spent})
        elif isinstance(event, Summary):
            if bar:
                bar.stop()
            if timings is not None:
                show_timings(out, timings.seconds)
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
    """One line: the name, a bar, the share, the time, the speed and what is left. Before the first step: what is done.

    What does not fit is left out from the right; a long name loses its middle.
    """

    def __init__(self, out: Output, source: str) -> None:
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress

        width = out.messages.width
        length = max(8, width // 5)
        self._bar = RichProgress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=length),
            TextColumn("{task.fields[told]}", markup=False),
            console=out.messages,
            transient=True,
            auto_refresh=False,
            # Data goes where the user sent it, and lines to stderr hide the bar themselves (`Output.hide`).
            redirect_stdout=False,
            redirect_stderr=False,
        )
        out.hide = self.stop
        self._drawn_s = -BAR_EVERY_S
        self._first: tuple[float, float] | None = None
        name = elided(printable(source), max(12, width // 4))
        self._told = width - 4 - len(name) - length
        self._task = self._bar.add_task(name, total=None, told="loading model")
        self._gone = False
        self._draw(self._bar.start)

    def update(self, event: Progress) -> None:
        now_s = time.monotonic()
        if self._first is None:
            self._first = (now_s, event.stream_time_s)
        if now_s - self._drawn_s < BAR_EVERY_S:
            return
        self._drawn_s = now_s
        # Something was written meanwhile, and the bar was taken away for it.
        self._draw(self._bar.start)
        self._draw(
            self._bar.update,
            self._task,
            total=event.duration_s,
            completed=min(event.stream_time_s, event.duration_s or event.stream_time_s),
            told=fitting(told_parts(event, self._first, now_s), self._told),
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


def told_parts(event: Progress, first: tuple[float, float], now_s: float) -> list[str]:
    """What a bar says beside itself, the most important first.

    Args:
        event: the latest.
        first: time of the clock and stream time at the first event; what is left is reckoned from there.
        now_s: time of the clock.
    """
    where, speed = time_text(event.stream_time_s), f"{event.frames_per_second:.0f} frames/s"
    state = f"state {bytes_text(event.state_bytes)}"
    if not event.duration_s:
        return [where, speed, state]
    share = min(1.0, event.stream_time_s / event.duration_s)
    parts = [f"{share:4.0%}", f"{where} / {time_text(event.duration_s)}"]
    watched_s = event.stream_time_s - first[1]
    if watched_s > 0:
        left_s = max(0.0, event.duration_s - event.stream_time_s) * (now_s - first[0]) / watched_s
        parts.append(f"{time_text(math.ceil(left_s))} left")
    return [*parts, speed, state]


def fitting(parts: list[str], room: int) -> str:
    """As many of them as a line has room for, at least the first."""
    while len(parts) > 1 and len("  ".join(parts)) > room:
        parts = parts[:-1]
    return "  ".join(parts)


def elided(name: str, length: int) -> str:
    """A long name without its middle: what tells files apart stands at the beginning and at the end."""
    if len(name) <= length:
        return name
    end = (length - 1) // 2
    return f"{name[: length - 1 - end]}\N{HORIZONTAL ELLIPSIS}{name[len(name) - end :]}"


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
