"""A fleet as its user sees it: the plan, the progress of all videos, the failures, and the table at the end."""

from __future__ import annotations

import csv
import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from protokv import errors
from protokv.errors import ConfigError, StateError
from protokv.texts import count_text
from protokv_cli.exits import Exit, exit_code
from protokv_cli.output import Format, Output
from protokv_cli.progress import LOG_EVERY_S, Bar
from protokv_cli.tables import bytes_text, grid, pairs, time_text

if TYPE_CHECKING:
    from protokv.fleet import Failure, Job, Outcome
    from protokv.fleet.run import Pool

# More videos, and more failures, are counted and not listed on a terminal; the files have them all.
LISTED: Final = 50

COLUMNS: Final = ("video", "state", "watched_s", "stream_time_s", "elapsed_s", "file_bytes", "result", "message")
"""The columns of `--csv`: seconds that this run watched, seconds of the state, seconds of work, bytes of the state."""


@dataclass
class Account:
    """The numbers of a run so far."""

    jobs: Sequence[Job]
    by_status: Counter[str] = field(default_factory=Counter)
    failures: int = 0
    watched_s: float = 0.0
    file_bytes: int = 0
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    began_s: float = field(default_factory=time.monotonic)

    @property
    def total(self) -> int:
        """The number of videos."""
        return len(self.jobs)

    def add(self, outcome: Outcome) -> None:
        """Count one more video."""
        self.by_status[outcome.status] += 1
        self.failures += outcome.failure is not None
        self.watched_s += outcome.watched_s
        self.file_bytes += outcome.file_bytes
        self.outcomes[outcome.job.key] = outcome

    def rows(self) -> list[dict[str, Any]]:
        """Return a row per video with an outcome, with the columns of `COLUMNS`, in the order of the videos."""
        return [_row(self.outcomes[job.key]) for job in self.jobs if job.key in self.outcomes]

    def speed(self, watched_s: float) -> tuple[float | None, float | None]:
        """Return seconds of stream a second, and seconds left by the share of videos that ended; None: unknown."""
        elapsed_s = time.monotonic() - self.began_s
        left_s = elapsed_s * (self.total - self.ended) / self.ended if self.ended else None
        return (watched_s / elapsed_s if watched_s and elapsed_s >= 1 else None), left_s

    @property
    def ended(self) -> int:
        """Videos with an outcome, stopped ones left out."""
        return self.by_status.total() - self.by_status["stopped"]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON."""
        counts = {status: self.by_status[status] for status in ("watched", "done", "stopped", "failed")}
        rest = {"left": self.total - self.ended, "failures": self.failures}
        return {"videos": self.total, **counts, **rest, "watched_s": self.watched_s, "file_bytes": self.file_bytes}


class Ledger:
    """The file of failures, a line of JSON each as they happen, and the first of them for a table."""

    def __init__(self, file: Path) -> None:
        """Remove the file of an earlier run; without failures there is no file."""
        self.file, self.rows = file, list[dict[str, Any]]()
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.unlink(missing_ok=True)
        except OSError as error:
            raise StateError(
                f"cannot write {file}: {error.strerror}", hint="choose a folder that you may write to"
            ) from error

    def add(self, outcome: Outcome) -> None:
        """Write the failure of a video, if it failed."""
        failure = outcome.failure
        if failure is None:
            return
        row = {
            **outcome.job.to_dict(),
            "state": outcome.state,
            "error": failure.kind,
            "message": failure.message,
            "hint": failure.hint,
            "exit_code": int(_exit_code_of(failure)),
            "attempts": outcome.attempts,
        }
        if len(self.rows) < LISTED:
            self.rows.append(row)
        with self.file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(row) + "\n")


def _exit_code_of(failure: Failure) -> Exit:
    """Return the exit code that `ingest` of this video alone would have."""
    if failure.kind == "Damaged":
        return Exit.PARTIAL
    kind = getattr(errors, failure.kind, None)
    return exit_code(kind("")) if isinstance(kind, type) and issubclass(kind, errors.ProtoKVError) else Exit.FAILURE


@dataclass
class FleetProgress:
    """A bar on a terminal, notes on stderr, or lines of JSON: how far all videos are, how fast, and the time left."""

    out: Output
    account: Account
    bar: Bar
    pool: Pool
    shown_s: float = field(default_factory=time.monotonic)

    @property
    def watched_s(self) -> float:
        """Seconds of stream that this run added."""
        return max(self.account.watched_s, self.pool.watched_s)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON: `seconds_left` for all videos, and `times_real_time`, seconds of stream a second."""
        speed, left_s = self.account.speed(self.watched_s)
        counts = {"videos": self.account.total, "ended": self.account.ended, "failures": self.account.failures}
        numbers = {"watched_s": self.watched_s, "times_real_time": speed, "seconds_left": left_s}
        return counts | {name: None if value is None else round(value, 2) for name, value in numbers.items()}

    def draw(self) -> None:
        """Show how far the fleet is, if it is time."""
        account = self.account
        if self.bar.due():
            speed, left_s = account.speed(self.watched_s)
            failed = [f"{account.failures} failed"] if account.failures else []
            left = [] if left_s is None else [f"about {time_text(round(left_s))} left"]
            rate = [] if speed is None else [f"{speed:.1f}x real time"]
            watched = f"{time_text(int(self.watched_s))} watched"
            ended = f"{account.ended} of {account.total} videos"
            self.bar.show([ended, *left, *failed, *rate, watched], account.ended, account.total)
        if self.out.format is Format.JSON and self.watched_s and time.monotonic() - self.shown_s > LOG_EVERY_S:
            self.shown_s = time.monotonic()
            self.out.json({"type": "progress", **self.to_dict()})


def show_plan(out: Output, found: Iterable[Outcome]) -> None:
    """Show what a run would do with each video as it is found, and in all."""
    from protokv.video.address import local_name

    counts, left_s, unmeasured = Counter[str](), 0.0, 0
    for one in found:
        counts[one.status] += 1
        left_s += one.left_s or 0.0
        unmeasured += one.left_s is None and one.status != "failed"
        if out.format is Format.JSON:
            out.json({"type": "plan", **one.to_dict()})
        else:
            why = f"\t{one.failure.message}" if one.failure else ""
            out.plain(f"{one.status}\t{local_name(one.job.source)}\t{one.state}{why}")
    videos = counts.total() - counts["done"] - counts["failed"]
    if out.format is Format.JSON:
        total = {"all": counts.total(), **counts, "videos": videos, "unmeasured": unmeasured, "left_s": left_s}
        out.json({"type": "forecast", **total})
    unknown = f" and {count_text(unmeasured, 'video')} of unknown length" if unmeasured else ""
    left = f", {time_text(round(left_s))} to watch{unknown}" if videos else ""
    out.note(f"{count_text(counts.total(), 'video')}: {_count_statuses(counts)}{left}; nothing was written")


def _count_statuses(counts: Counter[str]) -> str:
    return ", ".join(f"{n} {status}" for status, n in sorted(counts.items()))


def show_end(out: Output, account: Account, ledger: Ledger, stopped: Exit | None, csv_file: Path | None) -> None:
    """Show and write the table of all videos, and end with the exit code of a run that is not whole."""
    rows = account.rows()
    if csv_file:
        save_csv(rows, csv_file)
        out.note(f"table: {csv_file}")
    if out.format is Format.JSON:
        out.json({"type": "fleet", **account.to_dict()})
    elif out.format is Format.TABLE:
        cells = [_cells(row) for row in rows[:LISTED]]
        if len(rows) > LISTED:
            cells.append([f"and {len(rows) - LISTED} more: --csv FILE has all", *[""] * 4])
        out.table(grid(("video", "state", "watched", "took, s", "result"), cells), "", pairs(_sum_up(account)))
        if ledger.rows:
            failures = [(one["source"], one["exit_code"], one["message"]) for one in ledger.rows]
            if account.failures > len(failures):
                failures.append((f"and {account.failures - len(failures)} more", "", ""))
            out.table("", grid(["video", "exit code", "why"], failures, title="failures"))
    if account.failures:
        out.error(f"{account.failures} of {account.total} videos have no whole state; why is in {ledger.file}")
    if stopped is not None:
        out.warn("stopped; what was watched is committed. Continue with the same command.")
        raise typer.Exit(stopped)
    if account.failures or account.ended < account.total:
        raise typer.Exit(Exit.PARTIAL)


def _row(outcome: Outcome) -> dict[str, Any]:
    failure = outcome.failure
    damaged = failure is not None and outcome.status != "failed"
    return {
        "video": outcome.job.to_dict()["source"],
        "state": outcome.state,
        "watched_s": round(outcome.watched_s, 3),
        "stream_time_s": round(outcome.stream_time_s, 3),
        "elapsed_s": round(outcome.elapsed_s, 3),
        "file_bytes": outcome.file_bytes,
        "result": f"{outcome.status}, damaged" if damaged else outcome.status,
        "message": "" if failure is None else failure.message,
    }


def _cells(row: dict[str, Any]) -> list[str]:
    took = f"{row['elapsed_s']:.1f}" if row["elapsed_s"] else "-"
    watched = time_text(row["watched_s"]) if row["watched_s"] else "-"
    result = row["result"].replace("done", "done before")
    return [row["video"], row["state"], watched, took, result]


def _sum_up(account: Account) -> dict[str, str]:
    counts, watched_s = account.by_status, account.watched_s
    speed, _ = account.speed(watched_s)
    fast = "" if speed is None else f", {speed:.1f}x as fast as it plays"
    return {
        "videos": f"{account.total}: {counts['watched']} watched, {counts['done']} done before, "
        f"{counts['failed']} failed, {account.total - account.ended} left",
        "watched": time_text(watched_s) + fast,
        "states": f"{bytes_text(account.file_bytes)} on disk",
    }


def check_file(file: Path | None) -> None:
    """Refuse a table that cannot be written, before hours of work. ConfigError."""
    if file is not None and (file.is_dir() or not file.parent.is_dir()):
        raise ConfigError(f"cannot write the table {file}", hint="name a file in a folder that is there")


def save_csv(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Write a row per video, with a heading."""
    with file.open("w", encoding="utf-8", errors="backslashreplace", newline="") as lines:
        writer = csv.DictWriter(lines, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
