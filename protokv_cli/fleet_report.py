"""A fleet as its user sees it: the plan, the progress of all videos, the failures, and the table at the end."""

from __future__ import annotations

import csv
import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from protokv import errors
from protokv.errors import ConfigError, StateError
from protokv.texts import count_text
from protokv_cli.exits import Exit, find_exit_code
from protokv_cli.output import Format, Output
from protokv_cli.progress import LOG_EVERY_S, Bar
from protokv_cli.tables import format_bytes, format_time, grid, pairs

if TYPE_CHECKING:
    from protokv.fleet import Failure, Job, Outcome
    from protokv.fleet.run import Pool

# More videos are counted and not listed on a terminal; the files have them all.
LISTED: Final = 50

COLUMNS: Final = ("video", "state", "watched_s", "stream_time_s", "elapsed_s", "file_bytes", "result", "message")
"""The columns of `--csv`: seconds that this run watched, seconds of the state, seconds of work, bytes of the state."""


class FleetReport:
    """Counts the outcomes of a run and shows them: a bar or lines meanwhile, tables and files at the end."""

    def __init__(self, out: Output, jobs: Sequence[Job], failures_file: Path, bar: Bar, pool: Pool) -> None:
        """Remove the file of failures of an earlier run; without failures there is no file."""
        self._out, self._jobs, self._file, self._bar, self._pool = out, jobs, failures_file, bar, pool
        self._by_status, self._failures = Counter[str](), 0
        self._outcomes: dict[str, Outcome] = {}
        self._began_s = self._shown_s = time.monotonic()
        try:
            failures_file.parent.mkdir(parents=True, exist_ok=True)
            failures_file.unlink(missing_ok=True)
        except OSError as error:
            raise StateError(
                f"cannot write {failures_file}: {error.strerror}", hint="choose a folder that you may write to"
            ) from error

    def add(self, outcome: Outcome) -> None:
        """Count and show the end of a video; write its failure to the file, a line of JSON."""
        self._by_status[outcome.status] += 1
        self._outcomes[outcome.job.key] = outcome
        if failure := outcome.failure:
            self._failures += 1
            row = {
                **outcome.job.to_dict(),
                "state": outcome.state,
                "error": failure.kind,
                "message": failure.message,
                "hint": failure.hint,
                "exit_code": int(_find_exit_code(failure)),
                "attempts": outcome.attempts,
            }
            with self._file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(row) + "\n")
        if self._out.format is Format.JSON:
            self._out.json({"type": "video", **outcome.to_dict(), "fleet": self._progress()})
        elif self._out.format is Format.PLAIN and outcome.status in ("watched", "done"):
            self._out.plain(outcome.state)

    def draw(self) -> None:
        """Show how far the fleet is, if it is time."""
        found = self._progress()
        if self._bar.due():
            parts = [f"{found['ended']} of {found['videos']} videos"]
            parts += (
                [] if found["seconds_left"] is None else [f"about {format_time(round(found['seconds_left']))} left"]
            )
            parts += [f"{self._failures} failed"] if self._failures else []
            parts += [] if found["times_real_time"] is None else [f"{found['times_real_time']:.1f}x real time"]
            parts += [f"{format_time(int(found['watched_s']))} watched"]
            self._bar.show(parts, found["ended"], found["videos"])
        if self._out.format is Format.JSON and found["watched_s"] and time.monotonic() - self._shown_s > LOG_EVERY_S:
            self._shown_s = time.monotonic()
            self._out.json({"type": "progress", **found})

    def _progress(self) -> dict[str, Any]:
        """Return plain JSON: `seconds_left` by the share of videos that ended, `times_real_time` of the stream."""
        elapsed_s = time.monotonic() - self._began_s
        ended, total = self._ended, len(self._jobs)
        watched_s = max(self._sum("watched_s"), self._pool.watched_s)
        return {
            "videos": total,
            "ended": ended,
            "failures": self._failures,
            "watched_s": round(watched_s, 2),
            "times_real_time": round(watched_s / elapsed_s, 2) if watched_s and elapsed_s >= 1 else None,
            "seconds_left": round(elapsed_s * (total - ended) / ended, 2) if ended else None,
        }

    @property
    def _ended(self) -> int:
        return self._by_status.total() - self._by_status["stopped"]

    def _sum(self, name: str) -> Any:
        return sum(getattr(one, name) for one in self._outcomes.values())

    def end(self, stopped: Exit | None, csv_file: Path | None) -> None:
        """Show and write the table of all videos, and end with the exit code of a run that is not whole."""
        out, total, left = self._out, len(self._jobs), len(self._jobs) - self._ended
        rows = [_row(self._outcomes[job.key]) for job in self._jobs if job.key in self._outcomes]
        if csv_file:
            with csv_file.open("w", encoding="utf-8", errors="backslashreplace", newline="") as lines:
                writer = csv.DictWriter(lines, COLUMNS)
                writer.writeheader()
                writer.writerows(rows)
            out.note(f"table: {csv_file}")
        counts = {status: self._by_status[status] for status in ("watched", "done", "stopped", "failed")}
        sums = {"watched_s": self._sum("watched_s"), "file_bytes": self._sum("file_bytes")}
        if out.format is Format.JSON:
            out.json({"type": "fleet", "videos": total, **counts, "left": left, "failures": self._failures, **sums})
        elif out.format is Format.TABLE:
            names = ("video", "state", "watched_s", "elapsed_s", "result", "message")
            cells = [[row[name] for name in names] for row in rows[:LISTED]]
            if len(rows) > LISTED:
                cells.append([f"and {len(rows) - LISTED} more: --csv FILE has all", *[""] * 5])
            out.table(grid(("video", "state", "watched, s", "took, s", "result", "why"), cells, left=("why",)), "")
            done = f"{counts['watched']} watched, {counts['done']} done before, {counts['failed']} failed, {left} left"
            size = f"{format_bytes(sums['file_bytes'])} on disk"
            out.table(pairs({"videos": f"{total}: {done}", "watched": format_time(sums["watched_s"]), "states": size}))
        if self._failures:
            out.error(f"{self._failures} of {total} videos have no whole state; why is in {self._file}")
        if stopped is not None:
            out.note("stopped; what was watched is committed. Continue with the same command.")
            raise typer.Exit(stopped)
        if self._failures or left:
            raise typer.Exit(Exit.PARTIAL)


def _find_exit_code(failure: Failure) -> Exit:
    """Return the exit code that `ingest` of this video alone would have."""
    if failure.kind == "Damaged":
        return Exit.PARTIAL
    kind = getattr(errors, failure.kind, None)
    return (
        find_exit_code(kind("")) if isinstance(kind, type) and issubclass(kind, errors.ProtoKVError) else Exit.FAILURE
    )


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
    left = f", {format_time(round(left_s))} to watch{unknown}" if videos else ""
    statuses = ", ".join(f"{n} {status}" for status, n in sorted(counts.items()))
    out.note(f"{count_text(counts.total(), 'video')}: {statuses}{left}; nothing was written")


def check_csv(file: Path | None) -> None:
    """Refuse a table that cannot be written, before hours of work. ConfigError."""
    if file is not None and (file.is_dir() or not file.parent.is_dir()):
        raise ConfigError(f"cannot write the table {file}", hint="name a file in a folder that is there")
