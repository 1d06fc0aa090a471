"""`protokv ingest` of several videos: the plan, the run, its progress and its failures."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import typer

from protokv import errors
from protokv.backbones import require_model
from protokv.errors import ConfigError, SourceNotFound, StateError
from protokv.texts import count_text
from protokv_cli.exits import Exit, find_exit_code
from protokv_cli.options import note_embedded, option
from protokv_cli.output import Format, Output, format_bytes, format_time, pairs
from protokv_cli.parsing import parse_list
from protokv_cli.process import handle_signals
from protokv_cli.progress import LOG_EVERY_S, Bar
from protokv_cli.questions import open_lines

if TYPE_CHECKING:
    from protokv.fleet import Failure, Job, Outcome, Recipe
    from protokv.fleet.run import Pool
    from protokv.ingestion import IngestOptions


@dataclass(frozen=True, kw_only=True)
class FleetFlags:
    """How several videos are watched."""

    PANEL: ClassVar[str] = "Many videos"
    listing: str | None = option("--from LIST", "Videos, folders and globs from a file, one a line; - is stdin.")
    workers: int | None = option("--workers COUNT", "Processes, each with the model. Default: one a device.", min=1)
    devices: str | None = option("--devices LIST", "Devices of the workers in turn, such as 0,1 or cpu.")
    ray: str | None = option("--ray ADDRESS", "Workers in a Ray cluster: HOST:PORT, or auto: RAY_ADDRESS, or a new.")
    max_failures: int | None = option("--max-failures COUNT", "Begin no other video after COUNT failures.", min=1)


def ingest_fleet(
    out: Output, sources: list[str], output: str | None, chosen: IngestOptions, fleet: FleetFlags, *, dry_run: bool
) -> None:
    """Ingest every video that is not done yet into the folder `output`; end with exit code 3 if one of them failed."""
    from protokv.fleet import Recipe, preview, run_fleet
    from protokv.ingestion.options import DEFAULT_MODEL

    require_model(str(chosen.backbone or DEFAULT_MODEL), chosen.revision)
    recipe = Recipe(place=_place(output), options=chosen)
    jobs = _plan_jobs(sources, fleet.listing)
    note_embedded(out, str(chosen.backbone) if chosen.backbone else None)
    if dry_run:
        with handle_signals(out.note) as stop:
            _show_plan(out, takewhile(lambda _: not stop, preview(jobs, recipe)))
    else:
        with _open_pool(fleet, recipe) as pool:
            with handle_signals(out.note) as stop, Bar(out, f"0 of {len(jobs)} videos") as bar:
                report = _Report(out, jobs, recipe.place, bar, pool)

                def should_stop() -> bool:
                    report.draw()
                    return bool(stop)

                found = run_fleet(jobs, pool, recipe.place, max_failures=fleet.max_failures, should_stop=should_stop)
                for outcome in found:
                    report.add(outcome)
            report.end(stop.exit)
    if stop.exit is not None:
        raise typer.Exit(stop.exit)


def _place(output: str | None) -> str:
    """Return the folder or prefix of the states. ConfigError if `-o` names a single state."""
    from protokv.state.store import find_suffix

    place = output or "."
    if not Path(place).is_dir() and (find_suffix(place) is not None or Path(place).exists()):
        why = f"several videos become as many states, and {place} is the name of one"
        raise ConfigError(why, hint="name a folder: -o DIR/")
    return place


def _plan_jobs(sources: list[str], listing: str | None) -> list[Job]:
    from protokv.fleet import plan

    listed: list[str] = []
    try:
        if listing is not None:
            with nullcontext(sys.stdin) if listing == "-" else open_lines(Path(listing)) as lines:
                listed = [line.removeprefix("\ufeff").strip() for line in lines]
    except OSError as error:
        why = f"cannot read {listing}: {error.strerror}"
        raise SourceNotFound(why, hint="name a file with a video a line") from error
    jobs = plan([*sources, *filter(None, listed)])
    if not jobs:
        raise ConfigError("there is no video to ingest", hint="protokv ingest VIDEO..., a folder, or --from LIST")
    return jobs


def _open_pool(fleet: FleetFlags, recipe: Recipe) -> Any:
    from protokv.fleet import LocalPool

    if fleet.ray is not None:
        if fleet.devices is not None:
            raise ConfigError("--devices are those of one machine", hint="Ray gives each worker its own: leave it out")
        try:
            from protokv.fleet.cluster import RayPool
        except ImportError as error:
            why = f"--ray needs {error.name}, which is not installed"
            raise ConfigError(why, hint="pip install 'protokv[ray]'") from error
        return RayPool(recipe, None if fleet.ray == "auto" else fleet.ray, fleet.workers)
    named = parse_list(fleet.devices or recipe.options.device)
    devices = [f"cuda:{one}" if one.isdecimal() else one for one in named]
    return LocalPool(recipe, fleet.workers or len(devices), devices)


class _Report:
    """Counts the outcomes of a run and shows them: a line a video, a bar, and a file of failures."""

    def __init__(self, out: Output, jobs: list[Job], place: str, bar: Bar, pool: Pool) -> None:
        """Remove the file of failures of an earlier run; without failures there is no file."""
        from protokv.fleet.states import FAILURES
        from protokv.state.store import is_url

        self._out, self._jobs, self._bar, self._pool = out, jobs, bar, pool
        self._file = Path("." if is_url(place) else place, FAILURES)
        self._failures = 0
        self._outcomes: dict[str, Outcome] = {}
        self._began_s = self._shown_s = time.monotonic()
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.unlink(missing_ok=True)
        except OSError as error:
            raise StateError(
                f"cannot write {self._file}: {error.strerror}", hint="choose a folder that you may write to"
            ) from error

    def add(self, outcome: Outcome) -> None:
        """Count and show the end of a video; write its failure to the file, a line of JSON."""
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
        elif self._out.format is Format.TABLE:
            self._out.plain(_describe(outcome))
        elif outcome.status in ("watched", "done"):
            self._out.plain(outcome.state)

    def draw(self) -> None:
        """Show how far the fleet is, if it is time."""
        found = self._progress()
        if self._bar.due():
            left_s, speed = found["seconds_left"], found["times_real_time"]
            parts = [f"{found['ended']} of {found['videos']} videos"]
            parts += [] if left_s is None else [f"about {format_time(round(left_s))} left"]
            parts += [f"{self._failures} failed"] if self._failures else []
            parts += [] if speed is None else [f"{speed:.1f}x real time"]
            self._bar.show([*parts, f"{format_time(int(found['watched_s']))} watched"], found["ended"], found["videos"])
        if self._out.format is Format.JSON and found["watched_s"] and time.monotonic() - self._shown_s > LOG_EVERY_S:
            self._shown_s = time.monotonic()
            self._out.json({"type": "progress", **found})

    def _progress(self) -> dict[str, Any]:
        """Return plain JSON: `seconds_left` by the share of videos that ended, `times_real_time` of the stream."""
        elapsed_s = time.monotonic() - self._began_s
        ended, total = len(self._jobs) - self._left, len(self._jobs)
        watched_s = max(sum(one.watched_s for one in self._outcomes.values()), self._pool.watched_s)
        return {
            "videos": total,
            "ended": ended,
            "failures": self._failures,
            "watched_s": round(watched_s, 2),
            "times_real_time": round(watched_s / elapsed_s, 2) if watched_s and elapsed_s >= 1 else None,
            "seconds_left": round(elapsed_s * (total - ended) / ended, 2) if ended else None,
        }

    @property
    def _left(self) -> int:
        return len(self._jobs) - sum(one.status != "stopped" for one in self._outcomes.values())

    def end(self, stopped: Exit | None) -> None:
        """Show the totals, and end with exit code 3 if a video has no whole state."""
        out, total, left, found = self._out, len(self._jobs), self._left, self._outcomes.values()
        by_status = Counter(one.status for one in found)
        counts = {status: by_status[status] for status in ("watched", "done", "stopped", "failed")}
        watched_s, size = sum(one.watched_s for one in found), sum(one.file_bytes for one in found)
        if out.format is Format.JSON:
            sums = {"left": left, "failures": self._failures, "watched_s": watched_s, "file_bytes": size}
            out.json({"type": "fleet", "videos": total, **counts, **sums})
        elif out.format is Format.TABLE:
            done = f"{counts['watched']} watched, {counts['done']} done before, {counts['failed']} failed, {left} left"
            took = {"watched": format_time(watched_s), "states": f"{format_bytes(size)} on disk"}
            out.table(pairs({"videos": f"{total}: {done}", **took}))
        if self._failures:
            out.error(f"{self._failures} of {total} videos have no whole state; why is in {self._file}")
        if stopped is not None:
            out.note("stopped; what was watched is committed. Continue with the same command.")
        elif self._failures or left:
            raise typer.Exit(Exit.PARTIAL)


def _find_exit_code(failure: Failure) -> Exit:
    """Return the exit code that `ingest` of this video alone would have."""
    kind = getattr(errors, failure.kind, errors.ProtoKVError)
    return Exit.PARTIAL if failure.kind == "Damaged" else find_exit_code(kind(""))


def _describe(outcome: Outcome) -> str:
    """Return a line: status, video, state, and what is wrong."""
    cells = [outcome.status, outcome.job.to_dict()["source"], outcome.state]
    return "\t".join([*cells, outcome.failure.message] if outcome.failure else cells)


def _show_plan(out: Output, found: Iterable[Outcome]) -> None:
    """Show what a run would do with each video as it is found, and in all."""
    counts, left_s, unmeasured = Counter[str](), 0.0, 0
    for one in found:
        counts[one.status] += 1
        left_s += one.left_s or 0.0
        unmeasured += one.left_s is None and one.status != "failed"
        if out.format is Format.JSON:
            out.json({"type": "plan", **one.to_dict()})
        else:
            out.plain(_describe(one))
    videos = counts.total() - counts["done"] - counts["failed"]
    if out.format is Format.JSON:
        total = {"all": counts.total(), **counts, "videos": videos, "unmeasured": unmeasured, "left_s": left_s}
        out.json({"type": "forecast", **total})
    unknown = f" and {count_text(unmeasured, 'video')} of unknown length" if unmeasured else ""
    left = f", {format_time(round(left_s))} to watch{unknown}" if videos else ""
    statuses = ", ".join(f"{n} {status}" for status, n in sorted(counts.items()))
    out.note(f"{count_text(counts.total(), 'video')}: {statuses}{left}; nothing was written")
