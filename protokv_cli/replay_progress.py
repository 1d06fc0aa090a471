"""The progress of a replay, on stderr: its answers, and those that are judged."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager

from protokv.replay.judges import Judge, judge_rows
from protokv.replay.plan import Unread
from protokv.replay.rows import Row, RowFile
from protokv.replay.runner import Watched
from protokv_cli.output import Output
from protokv_cli.progress import Bar, left_text
from protokv_cli.tables import time_text


@contextmanager
def following(
    out: Output, answers: int, unread: MutableMapping[str, str]
) -> Iterator[Callable[[Row | Watched | Unread], None]]:
    """Return a function that takes each event of a replay and shows its progress.

    Unreadable videos are reported at once and added to `unread`.
    """
    bar, given, began_s = Bar(out, f"0 of {answers} answers"), 0, time.monotonic()

    def follow(event: Row | Watched | Unread) -> None:
        nonlocal given
        if isinstance(event, Unread):
            unread[event.video] = event.why
            out.warn(f"left out: {event.video}: {event.why}")
        elif isinstance(event, Row):
            given += 1
        elif bar.due():
            left = left_text(given, answers - given, time.monotonic() - began_s)
            where = f"{event.video} {time_text(event.stream_time_s)} / {time_text(event.length_s)}"
            bar.show([f"{given} of {answers} answers", *left, where], given, answers)

    try:
        yield follow
    finally:
        bar.stop()


def judging(out: Output, results: RowFile, keys: Sequence[str], judge: Judge, should_stop: Callable[[], bool]) -> None:
    """Judge open answers, and report the number without a verdict."""
    without = 0
    for row in judge_rows(results, keys, judge):
        without += row is None
        if should_stop():
            return
    if without:
        out.warn(f"{without} answers have no verdict of {judge.label}; run the same command again to ask for them")
