"""What a fleet shows: one bar over all videos on a terminal, a line now and then elsewhere, and tables at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from protokv_cli.bar import Bar
from protokv_cli.fleet_account import Account
from protokv_cli.output import Output
from protokv_cli.tables import bytes_text, grid, pairs, time_text

if TYPE_CHECKING:
    from rich.console import RenderableType


@contextmanager
def watching(out: Output, account: Account) -> Iterator[Callable[[], None]]:
    """A function that shows how far the account has come."""
    began_s = time.monotonic()
    bar = Bar(out, _parts(account, 0.0)[0])

    def show() -> None:
        if bar.due():
            bar.show(_parts(account, time.monotonic() - began_s), account.ended, account.total)

    try:
        yield show
    finally:
        bar.stop()


def _parts(account: Account, elapsed_s: float) -> list[str]:
    failed = [f"{account.failures} failed"] if account.failures else []
    rate = [f"{account.watched_s / elapsed_s:.0f}x as fast as it plays"] if elapsed_s > 1 else []
    watched = f"{time_text(int(account.watched_s))} watched"
    return [f"{account.ended} of {account.total} videos", *failed, watched, *rate]


def closing_tables(account: Account, failures: Sequence[dict[str, Any]]) -> Iterator[RenderableType]:
    """What was done, and the first of its failures."""
    counts = account.by_status
    rows = {
        "videos": f"{account.total}: {counts['watched']} watched, {counts['done']} done before, "
        f"{counts['failed']} failed, {account.total - account.ended} left",
        "watched": time_text(account.watched_s),
        "states": f"{bytes_text(account.file_bytes)} on disk",
    }
    yield pairs(rows)
    if failures:
        shown = [(one["source"], one["exit_code"], one["message"]) for one in failures]
        if account.failures > len(failures):
            shown.append((f"and {account.failures - len(failures)} more", "", ""))
        yield grid(["video", "exit code", "why"], shown, title="failures")
