"""What `ingest` shows while it runs: a bar on a terminal, JSON lines in a pipe, one line at the end in plain form."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from protokv.ingestion import Event, Progress, Summary
from protokv.timings import Timings
from protokv_cli.bar import Bar, left_text
from protokv_cli.output import Format, Output
from protokv_cli.tables import bytes_text, time_text
from protokv_cli.timings import rounded, show_timings

# A reader of the JSON lines wants to follow, not to be flooded.
JSON_EVERY_S = 1.0


@contextmanager
def reporting(out: Output, source: str, timings: Timings | None = None) -> Iterator[Callable[[Event], None]]:
    """A function that takes each event of an ingest and shows it in the chosen format; at the end where time went."""
    is_json = out.format is Format.JSON
    bar = Bar(out, "loading model", source, logs=not is_json)
    row_s = -JSON_EVERY_S
    first: tuple[float, float] | None = None

    def report(event: Event) -> None:
        nonlocal row_s, first
        if isinstance(event, Progress):
            now_s = time.monotonic()
            first = first or (now_s, event.stream_time_s)
            if bar.due():
                done_s, length_s = event.stream_time_s, event.duration_s
                bar.show(told_parts(event, first, now_s), min(done_s, length_s or done_s), length_s)
            if not is_json or now_s - row_s < JSON_EVERY_S:
                return
            row_s = now_s
        if is_json:
            spent = {"timings": rounded(timings.seconds)} if timings is not None and isinstance(event, Summary) else {}
            out.json({"type": type(event).__name__.lower(), **asdict(event), **spent})
        elif isinstance(event, Summary):
            bar.stop()
            if timings is not None:
                show_timings(out, timings.seconds)
            if out.format is Format.PLAIN:
                out.plain(event.state)
            else:
                _table(out, event)

    try:
        yield report
    finally:
        bar.stop()


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
    left = left_text(event.stream_time_s - first[1], event.duration_s - event.stream_time_s, now_s - first[0])
    return [f"{share:4.0%}", f"{where} / {time_text(event.duration_s)}", *left, speed, state]


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
