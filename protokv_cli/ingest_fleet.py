"""`protokv ingest` of several videos: the plan, the run, its progress and its failures."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from protokv import errors
from protokv.backbones import require_model
from protokv.errors import ConfigError, SourceNotFound
from protokv.texts import JsonObject, format_count
from protokv_cli.asking import decode_line, open_lines
from protokv_cli.exits import ExitCode, find_exit_code
from protokv_cli.options import Flags, option
from protokv_cli.output import Output, ProgressBar, format_bytes, format_time
from protokv_cli.parsing import parse_list
from protokv_cli.process import StopSignal, handle_signals

if TYPE_CHECKING:
    from protokv.fleet import JobRecipe, LocalWorkerPool, VideoOutcome
    from protokv.ingestion import IngestOptions


class FleetFlags(Flags, panel="Many videos"):
    """How several videos are watched."""

    listing: str | None = option(
        "--from LIST", "Videos and folders from a file, one a line; - is stdin."
    )
    workers: int | None = option(
        "--workers COUNT", "Processes, each with the model. Default: one a device.", min=1
    )
    devices: str | None = option(
        "--devices LIST", "Devices of the workers in turn, such as 0,1 or cpu."
    )
    max_failures: int | None = option(
        "--max-failures COUNT", "Begin no other video after COUNT failures.", min=1
    )


def ingest_fleet(
    out: Output,
    sources: list[str],
    output: str | None,
    chosen: IngestOptions,
    fleet: FleetFlags,
    *,
    dry_run: bool,
) -> None:
    """Ingest every video that is not done yet into the folder `output`; end with exit code 3 if one
    of them failed.
    """
    from protokv.fleet import JobRecipe, list_video_jobs, preview_fleet, run_fleet
    from protokv.ingestion.options import DEFAULT_MODEL
    from protokv_cli.ingest_report import show_query_hint

    place = output or "."
    check_place(place)
    model = str(chosen.backbone or DEFAULT_MODEL)
    require_model(model, chosen.revision)
    recipe = JobRecipe(place=place, options=chosen)
    jobs = list_video_jobs([*sources, *(_read_list(fleet.listing) if fleet.listing else [])])
    if not jobs:
        raise ConfigError(
            "there is no video to ingest", hint="protokv ingest VIDEO..., a folder, or --from LIST"
        )
    out.note_model(model)
    with handle_signals(out.note) as stop:
        if dry_run:
            _show_plan(out, preview_fleet(jobs, recipe), stop)
        else:
            with _open_pool(fleet, recipe) as pool, _Report(out, len(jobs), place, stop) as report:
                found = run_fleet(
                    jobs, pool, place, max_failures=fleet.max_failures, should_stop=report.draw
                )
                for outcome in found:
                    report.add(outcome)
            report.end()
    if stop.exit is not None:
        raise typer.Exit(stop.exit)
    if not dry_run:
        show_query_hint(out, place, model, chosen.backbone)


def check_place(place: str) -> None:
    """Raise ConfigError if states cannot lie in this folder, as it is the name of one."""
    from protokv.state.store import STATE_FORMS

    if not Path(place).is_dir() and (place.endswith(tuple(STATE_FORMS)) or Path(place).exists()):
        raise ConfigError(
            f"several videos become as many states, and {place} is the name of one",
            hint="name a folder: -o DIR/",
        )


def _read_list(listing: str) -> list[str]:
    """Return the lines of a list of videos; `-` is stdin."""
    try:
        with open_lines(listing) as lines:
            return [text for line in lines if (text := decode_line(line))]
    except OSError as error:
        raise SourceNotFound(
            f"cannot read {listing}: {error.strerror}", hint="name a file with a video a line"
        ) from error


def _open_pool(fleet: FleetFlags, recipe: JobRecipe) -> LocalWorkerPool:
    from protokv.fleet import LocalWorkerPool

    named = parse_list(fleet.devices or recipe.options.device)
    devices = [f"cuda:{one}" if one.isdecimal() else one for one in named]
    return LocalWorkerPool(recipe, fleet.workers or len(devices), devices)


class _Report(ProgressBar):
    """Counts the outcomes of a run and shows them: a line a video, a bar, and a file of
    failures.
    """

    def __init__(self, out: Output, videos: int, place: str, stop: StopSignal) -> None:
        """Remove the file of failures of an earlier run; without failures there is no file."""
        from protokv.state.commit import explain_write_errors
        from protokv.state.store import is_remote_state

        super().__init__(out, f"0 of {videos} videos")
        self._videos = videos
        self._stop = stop
        self._file = Path("." if is_remote_state(place) else place, "failures.jsonl")
        self._counts = Counter[str]()
        self._failures = 0
        self._watched_s = 0.0
        self._file_bytes = 0
        self._began_s = time.monotonic()
        with explain_write_errors(self._file):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.unlink(missing_ok=True)

    @property
    def _left(self) -> int:
        return self._videos - sum(self._counts.values()) + self._counts["stopped"]

    def add(self, outcome: VideoOutcome) -> None:
        """Count and show the end of a video; write its failure to the file, a line of JSON."""
        self._counts[outcome.status] += 1
        self._watched_s = self._watched_s + outcome.watched_s
        self._file_bytes = self._file_bytes + outcome.file_bytes
        if failure := outcome.failure:
            self._failures += 1
            kind = getattr(errors, failure.kind, errors.ProtoKVError)
            # What `ingest` of this video alone ends with.
            code = ExitCode.PARTIAL if failure.kind == "Damaged" else find_exit_code(kind(""))
            row = {
                **outcome.job.to_dict(),
                "state": outcome.state,
                "error": failure.kind,
                "message": failure.message,
            }
            more = {"hint": failure.hint, "exit_code": int(code), "attempts": outcome.attempts}
            with self._file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(row | more) + "\n")
        _show(self._out, outcome, {"type": "video", **outcome.to_dict(), "fleet": self._progress()})

    def draw(self) -> bool:
        """Show how far the fleet is, if it is time; return True if it is to stop."""
        found = self._progress()
        if self.due():
            left_s = found["seconds_left"]
            speed = found["times_real_time"]
            parts = [f"{found['ended']} of {self._videos} videos"]
            parts += [] if left_s is None else [f"about {format_time(round(left_s))} left"]
            parts += [f"{self._failures} failed"] if self._failures else []
            parts += [] if speed is None else [f"{speed:.1f}x real time"]
            self.show(
                [*parts, f"{format_time(int(found['watched_s']))} watched"],
                found["ended"],
                self._videos,
            )
        if found["watched_s"] and self.row_due():
            self._out.json({"type": "progress", **found})
        return bool(self._stop)

    def _progress(self) -> JsonObject:
        """Return plain JSON: `seconds_left` by the share of videos that ended, `times_real_time` of
        the stream.
        """
        elapsed_s = time.monotonic() - self._began_s
        ended = self._videos - self._left
        return {
            "videos": self._videos,
            "ended": ended,
            "failures": self._failures,
            "watched_s": round(self._watched_s, 2),
            "times_real_time": round(self._watched_s / elapsed_s, 2)
            if self._watched_s and elapsed_s >= 1
            else None,
            "seconds_left": round(elapsed_s * (self._videos - ended) / ended, 2) if ended else None,
        }

    def end(self) -> None:
        """Show the totals, and end with 3 if a video has no whole state and no signal is why."""
        out = self._out
        left = self._left
        counts = self._counts
        if out.as_json:
            ends = {status: counts[status] for status in ("watched", "done", "stopped", "failed")}
            sums = {
                "failures": self._failures,
                "watched_s": self._watched_s,
                "file_bytes": self._file_bytes,
            }
            out.json({"type": "fleet", "videos": self._videos, **ends, "left": left, **sums})
        else:
            counts["not begun"] = left - counts["stopped"]
            added = (
                f"{format_time(round(self._watched_s))} watched, {format_bytes(self._file_bytes)} "
                "of states"
            )
            out.text(f"{_count_videos(counts)}; {added}")
        if self._failures:
            out.error(
                f"{self._failures} of {self._videos} videos have no whole state; why is in "
                f"{self._file}"
            )
        if self._stop:
            out.note("stopped; what was watched is committed. Continue with the same command.")
        elif self._failures or left:
            raise typer.Exit(ExitCode.PARTIAL)


def _show(out: Output, outcome: VideoOutcome, row: JsonObject) -> None:
    """Write the outcome as a row, or as a line: status, video, state, failure and notes."""
    wrong = [outcome.failure.message] if outcome.failure else []
    line = "\t".join(
        [outcome.status, outcome.job.to_dict()["source"], outcome.state, *wrong, *outcome.notes]
    )
    out.json(row) if out.as_json else out.text(line)


def _show_plan(out: Output, found: Iterable[VideoOutcome], stop: StopSignal) -> None:
    """Show what a run would do with each video as it is found, and in all; end with 3 if it
    would.
    """
    counts = Counter[str]()
    left_s = 0.0
    unmeasured = 0
    for one in takewhile(lambda _: not stop, found):
        counts[one.status] += 1
        left_s += one.left_s or 0.0
        unmeasured += one.left_s is None and one.status != "failed"
        _show(out, one, {"type": "plan", **one.to_dict()})
    videos = counts.total() - counts["done"] - counts["failed"]
    if out.as_json:
        total = {"all": counts.total(), **counts, "videos": videos}
        out.json({"type": "forecast", **total, "unmeasured": unmeasured, "left_s": left_s})
    unknown = f" and {format_count(unmeasured, 'video')} of unknown length" if unmeasured else ""
    left = f", {format_time(round(left_s))} to watch{unknown}" if videos else ""
    out.note(f"{_count_videos(counts)}{left}; nothing was written")
    if counts["failed"] and not stop:
        raise typer.Exit(ExitCode.PARTIAL)


def _count_videos(counts: Counter[str]) -> str:
    statuses = ", ".join(f"{n} {status}" for status, n in sorted(counts.items()) if n)
    return f"{format_count(counts.total(), 'video')}: {statuses}"
