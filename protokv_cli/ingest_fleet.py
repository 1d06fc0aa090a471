"""`protokv ingest` of several videos: planning, running, counting, and the list of failures."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import typer

from protokv import errors
from protokv.backbones import EMBEDDED, require_model
from protokv.errors import ConfigError, SourceNotFound, StateError
from protokv_cli.answers import warn_of_answers
from protokv_cli.exits import Exit, exit_code
from protokv_cli.output import Format, Output
from protokv_cli.parsing import parse_list
from protokv_cli.process import stopping
from protokv_cli.progress import Bar
from protokv_cli.tables import bytes_text, grid, pairs, time_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from protokv.fleet import Failure, Job, Looked, Outcome
    from protokv.ingestion import IngestOptions

# More failures are counted, not listed; the file has them all.
FAILURES_LISTED = 50


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """The options of `ingest` that are for several videos only, as they were written."""

    workers: int | None = None
    devices: str | None = None
    batch: int = 1
    ray: str | None = None
    max_failures: int | None = None
    failures: Path | None = None

    def given(self) -> list[str]:
        """Return the names of the options that differ from their defaults."""
        changed = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
        return ["--" + name.replace("_", "-") for name in changed]


def ingest_fleet(
    out: Output,
    sources: list[str],
    listing: str | None,
    output: str | None,
    chosen: IngestOptions,
    fleet: FleetOptions,
    *,
    dry_run: bool,
) -> None:
    """Ingest every video that is not done yet into the folder `output`; end with exit code 3 if one of them failed."""
    from protokv.fleet import Recipe, look_fleet, run_fleet

    _refuse_single(chosen)
    require_model(str(chosen.backbone or EMBEDDED), chosen.revision)
    recipe = Recipe(place=_place(output), options=chosen)
    jobs = _plan_jobs(out, sources, listing)
    with _open_pool(fleet, recipe) as pool:
        if dry_run:
            _show_plan(out, look_fleet(jobs, pool, recipe.place), len(jobs))
            return
        ledger = Ledger(_failures_file(fleet, recipe.place))
        account, began_s = Account(len(jobs)), time.monotonic()
        with stopping(out.warn) as stop, Bar(out, _progress_parts(account, 0.0)[0]) as bar:
            for outcome in run_fleet(
                jobs,
                pool,
                recipe.place,
                batch=fleet.batch,
                max_failures=fleet.max_failures,
                should_stop=lambda: bool(stop),
            ):
                account.add(outcome)
                ledger.add(outcome)
                if out.format is Format.JSON:
                    out.json({"type": "video", **outcome.to_dict()})
                elif out.format is Format.PLAIN and outcome.status in ("watched", "done"):
                    out.plain(outcome.state)
                if bar.due():
                    bar.show(_progress_parts(account, time.monotonic() - began_s), account.ended, account.total)
        _show_end(out, account, ledger, stop.exit)


def _refuse_single(chosen: IngestOptions) -> None:
    """Refuse options that are for one video only. ConfigError."""
    live = chosen.live
    given = {
        "--append": chosen.append,
        "--resume": chosen.resume,
        "--start": chosen.start_s,
        "--duration": chosen.duration_s is not None,
        "--chunk": chosen.chunk > 1,
        "--for": live.for_s is not None,
        "--until": live.until is not None,
        "--follow": live.follow,
        "--stall": live.stall_s is not None,
        "--give-up": live.give_up_s is not None,
        "--on-pressure": live.on_pressure,
        "--input": live.input,
    }
    names = [name for name, value in given.items() if value]
    if names:
        raise ConfigError(
            f"{' and '.join(names)}: for one video only",
            hint="several videos are continued without an option, and watched to their ends",
        )


def _place(output: str | None) -> str:
    """Return the folder or prefix of the states. ConfigError if `-o` names a single state."""
    from protokv.storage.form import is_url, suffix_of

    place = output or "."
    if suffix_of(place) is not None and not Path(place).is_dir():
        raise ConfigError(
            f"several videos become as many states, and {place} is the name of one", hint="name a folder: -o DIR/"
        )
    if is_url(place) or Path(place).is_dir() or not Path(place).exists():
        return place
    raise ConfigError(f"{place} is no folder", hint="name a folder for the states: -o DIR/")


def _plan_jobs(out: Output, sources: list[str], listing: str | None) -> list[Job]:
    from protokv.fleet import plan, read_manifest

    listed: list[Job] = []
    if listing == "-":
        listed = list(read_manifest(out.stdin or sys.stdin, "stdin"))
    elif listing is not None:
        try:
            with Path(listing).open(encoding="utf-8", errors="surrogateescape") as lines:
                listed = list(read_manifest(lines, listing))
        except OSError as error:
            raise SourceNotFound(
                f"cannot read {listing}: {error.strerror}", hint="name a file with a video a line"
            ) from None
    jobs = plan(sources, listed)
    if not jobs:
        raise ConfigError("there is no video to ingest", hint="protokv ingest VIDEO..., a folder, or --from LIST")
    return jobs


def _open_pool(fleet: FleetOptions, recipe: Any) -> Any:
    from protokv.fleet import LocalPool

    if fleet.ray is not None:
        if fleet.devices is not None:
            raise ConfigError("--devices are those of one machine", hint="Ray gives each worker its own: leave it out")
        try:
            from protokv.fleet.cluster import RayPool
        except ImportError as error:
            raise ConfigError(
                f"--ray needs {error.name}, which is not installed", hint="pip install 'protokv[ray]'"
            ) from error
        return RayPool(recipe, None if fleet.ray == "auto" else fleet.ray, fleet.workers)
    named = parse_list(fleet.devices or recipe.options.device)
    devices = [f"cuda:{one}" if one.isdecimal() else one for one in named]
    return LocalPool(recipe, fleet.workers or len(devices), devices)


def _failures_file(fleet: FleetOptions, place: str) -> Path:
    from protokv.fleet.states import FAILURES
    from protokv.storage.form import is_url

    return fleet.failures or Path("." if is_url(place) else place, FAILURES)


@dataclass
class Account:
    """The numbers of a run so far."""

    total: int
    by_status: Counter[str] = field(default_factory=Counter)
    failures: int = 0
    watched_s: float = 0.0
    file_bytes: int = 0
    beyond: list[str] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """Count one more video."""
        self.by_status[outcome.status] += 1
        self.failures += outcome.failure is not None
        self.watched_s += outcome.watched_s
        self.file_bytes += outcome.file_bytes
        if outcome.beyond_model:
            self.beyond.append(PurePath(outcome.job.source).name)

    @property
    def ended(self) -> int:
        """Videos with an outcome, stopped ones left out."""
        return self.by_status.total() - self.by_status["stopped"]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON."""
        counts = {status: self.by_status[status] for status in ("watched", "done", "stopped", "failed")}
        rest = {"left": self.total - self.ended, "failures": self.failures, "beyond_model": len(self.beyond)}
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
        if len(self.rows) < FAILURES_LISTED:
            self.rows.append(row)
        with self.file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(row) + "\n")


def _exit_code_of(failure: Failure) -> Exit:
    """Return the exit code that `ingest` of this video alone would have."""
    if failure.kind == "Damaged":
        return Exit.PARTIAL
    kind = getattr(errors, failure.kind, None)
    return exit_code(kind("")) if isinstance(kind, type) and issubclass(kind, errors.ProtoKVError) else Exit.FAILURE


def _show_plan(out: Output, found: Iterator[Looked], total: int) -> None:
    from protokv.video.address import told

    counts = Counter[str]()
    for looked in found:
        counts[looked.status] += 1
        if out.format is Format.JSON:
            out.json({"type": "plan", **looked.to_dict()})
        else:
            why = f"\t{looked.failure.message}" if looked.failure else ""
            out.plain(f"{looked.status}\t{told(looked.job.source)}\t{looked.state}{why}")
    words = ", ".join(f"{n} {status}" for status, n in sorted(counts.items()))
    out.note(f"{total} videos: {words}; nothing was written")


def _progress_parts(account: Account, elapsed_s: float) -> list[str]:
    failed = [f"{account.failures} failed"] if account.failures else []
    rate = [f"{account.watched_s / elapsed_s:.0f}x as fast as it plays"] if elapsed_s > 1 else []
    watched = f"{time_text(int(account.watched_s))} watched"
    return [f"{account.ended} of {account.total} videos", *failed, watched, *rate]


def _show_end(out: Output, account: Account, ledger: Ledger, stopped: Exit | None) -> None:
    """Show the numbers and the failures, and end with the exit code of a run that is not whole."""
    if out.format is Format.JSON:
        out.json({"type": "fleet", **account.to_dict()})
    elif out.format is Format.TABLE:
        for table in _closing_tables(account, ledger.rows):
            out.table(table)
    warn_of_answers(out, account.beyond)
    if account.failures:
        out.warn(f"{account.failures} of {account.total} videos have no whole state; why is in {ledger.file}")
    if stopped is not None:
        out.warn("stopped; what was watched is committed. Continue with the same command.")
        raise typer.Exit(stopped)
    if account.failures or account.ended < account.total:
        raise typer.Exit(Exit.PARTIAL)


def _closing_tables(account: Account, failures: list[dict[str, Any]]) -> Iterator[RenderableType]:
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
