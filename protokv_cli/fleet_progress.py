"""What a fleet shows: one bar over all videos on a terminal, a line now and then elsewhere, and tables at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from protokv_cli.output import Output
from protokv_cli.progress import BAR_EVERY_S, LOG_EVERY_S
from protokv_cli.tables import bytes_text, grid, pairs, time_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from protokv_cli.fleet import Account


@contextmanager
def watching(out: Output, account: Account) -> Iterator[Callable[[], None]]:
    """A function that shows how far the account has come."""
    began = last_s = time.monotonic()
    bar = _Bar(out) if out.messages.is_terminal and not out.quiet else None

    def show() -> None:
        nonlocal last_s
        now = time.monotonic()
        if bar:
            bar.show(account, _where(account, now - began))
        elif now - last_s >= LOG_EVERY_S:
            last_s = now
            out.note(_where(account, now - began))

    try:
        yield show
    finally:
        if bar:
            bar.stop()


class _Bar:
    """Videos done of all; lines to the terminal take it away, and the next video brings it back."""

    def __init__(self, out: Output) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        columns = BarColumn(), TextColumn("{task.description}", markup=False)
        self._bar = Progress(
            *columns,
            console=out.messages,
            transient=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task("")
        self._shown_s = -BAR_EVERY_S
        out.hide = self.stop

    def show(self, account: Account, where: str) -> None:
        if time.monotonic() - self._shown_s < BAR_EVERY_S:
            return
        self._shown_s = time.monotonic()
        # The terminal may be gone; for a broken pipe rich raises SystemExit.
        with suppress(OSError, ValueError, SystemExit):
            self._bar.start()
            self._bar.update(self._task, total=account.total, completed=account.ended, description=where, refresh=True)

    def stop(self) -> None:
        with suppress(OSError, ValueError, SystemExit):
            self._bar.stop()


def _where(account: Account, elapsed_s: float) -> str:
    rate = f", {account.watched_s / elapsed_s:.0f}x as fast as it plays" if elapsed_s > 1 else ""
    failed = f", {account.failures} failed" if account.failures else ""
    return f"{account.ended} of {account.total} videos{failed}, {time_text(int(account.watched_s))} watched{rate}"


def closing_tables(account: Account, failures: Sequence[dict[str, Any]], n_failures: int) -> Iterator[RenderableType]:
    """What was done, and the first of so many failures."""
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
        if n_failures > len(failures):
            shown.append((f"and {n_failures - len(failures)} more", "", ""))
        yield grid(["video", "exit code", "why"], shown, title="failures")
