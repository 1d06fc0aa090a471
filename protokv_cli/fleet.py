"""`protokv ingest` of several videos: what is planned, what is done, what has failed and why."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import typer

from protokv.errors import ConfigError, SourceNotFound
from protokv_cli.exits import Exit
from protokv_cli.fleet_account import Account, Ledger
from protokv_cli.fleet_progress import closing_tables, watching
from protokv_cli.output import Format, Output
from protokv_cli.parsing import parse_list
from protokv_cli.signals import Stop, stopping

if TYPE_CHECKING:
    from protokv.fleet import Job, Looked, Outcome, Recipe


@dataclass(frozen=True, kw_only=True)
class FleetOptions:
    """What `ingest` was told about several videos; `output` and `sources` as they were written."""

    sources: list[str]
    output: str | None
    listing: str | None
    workers: int | None
    devices: str | None
    batch: int
    ray: str | None
    dry_run: bool
    max_failures: int | None
    failures: Path | None

    @property
    def wanted(self) -> bool:
        """Whether this is not simply one video into one state."""
        from protokv.fleet.plan import is_place, several

        told = (self.listing, self.workers, self.ray, self.max_failures, self.failures)
        return (
            len(self.sources) != 1
            or any(one is not None for one in told)
            or several(self.sources[0])
            or (self.output is not None and is_place(self.output))
        )

    @property
    def place(self) -> str:
        """Where the states go; the current folder where nothing is said. ConfigError if that is a single state."""
        from protokv.storage.form import is_url, suffix_of

        place = self.output or "."
        if suffix_of(place) is not None and not Path(place).is_dir():
            raise ConfigError(
                f"several videos become as many states, and {place} is the name of one", hint="name a folder: -o DIR/"
            )
        if is_url(place) or Path(place).is_dir() or not Path(place).exists():
            return place
        raise ConfigError(f"{place} is no folder", hint="name a folder for the states: -o DIR/")


def ingest_fleet(out: Output, options: FleetOptions, recipe: Recipe) -> None:
    """Ingest every video that is not done yet. Ends the program with 3 where one of them failed."""
    from protokv.fleet import look_fleet, run_fleet

    jobs = _jobs(out, options)
    with _pool(options, recipe) as pool:
        if options.dry_run:
            _tell_plan(out, look_fleet(jobs, pool, recipe.place), len(jobs))
            return
        ledger = Ledger(_failures_file(options, recipe.place))
        account = Account(len(jobs))
        with stopping(out.warn) as stop, ledger, watching(out, account) as show:
            for outcome in run_fleet(
                jobs,
                pool,
                recipe.place,
                batch=options.batch,
                max_failures=options.max_failures,
                should_stop=lambda: bool(stop),
            ):
                account.add(outcome)
                ledger.add(outcome)
                _tell(out, outcome)
                show()
        _close(out, account, ledger, stop)


def _jobs(out: Output, options: FleetOptions) -> list[Job]:
    from protokv.fleet import plan, read_manifest

    listed: list[Job] = []
    if options.listing is not None:
        with _lines(out, options.listing) as lines:
            listed.extend(read_manifest(lines, "stdin" if options.listing == "-" else options.listing))
    jobs = plan(options.sources, listed)
    if not jobs:
        raise ConfigError("there is no video to ingest", hint="protokv ingest VIDEO..., a folder, or --from LIST")
    return jobs


@contextmanager
def _lines(out: Output, listing: str) -> Iterator[IO[str]]:
    if listing == "-":
        yield out.stdin or sys.stdin
        return
    try:
        with Path(listing).open(encoding="utf-8", errors="surrogateescape") as lines:
            yield lines
    except OSError as error:
        raise SourceNotFound(
            f"cannot read {listing}: {error.strerror}", hint="name a file with a video a line"
        ) from None


def _pool(options: FleetOptions, recipe: Recipe) -> Any:
    from protokv.fleet import LocalPool

    if options.ray is not None:
        if options.devices is not None:
            raise ConfigError("--devices are those of one machine", hint="Ray gives each worker its own: leave it out")
        try:
            from protokv.fleet.cluster import RayPool
        except ImportError as error:
            raise ConfigError(
                f"--ray needs {error.name}, which is not installed", hint="pip install 'protokv[ray]'"
            ) from error
        return RayPool(recipe, None if options.ray == "auto" else options.ray, options.workers)
    devices = [f"cuda:{one}" if one.isdecimal() else one for one in parse_list(options.devices or "auto")]
    return LocalPool(recipe, options.workers or len(devices), devices)


def _failures_file(options: FleetOptions, place: str) -> Path:
    from protokv.fleet.survey import FAILURES
    from protokv.storage.form import is_url

    return options.failures or Path("." if is_url(place) else place, FAILURES)


def _tell_plan(out: Output, found: Iterator[Looked], total: int) -> None:
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


def _tell(out: Output, outcome: Outcome) -> None:
    if out.format is Format.JSON:
        out.json({"type": "video", **outcome.to_dict()})
    elif out.format is Format.PLAIN and outcome.status in ("watched", "done"):
        out.plain(outcome.state)


def _close(out: Output, account: Account, ledger: Ledger, stop: Stop) -> None:
    if out.format is Format.JSON:
        out.json({"type": "fleet", **account.to_dict()})
    elif out.format is Format.TABLE:
        for table in closing_tables(account, ledger.rows):
            out.table(table)
    if account.failures:
        out.warn(f"{account.failures} of {account.total} videos have no whole state; why is in {ledger.file}")
    if stop.exit is not None:
        out.warn("stopped; what was watched is committed. Continue with the same command.")
        raise typer.Exit(stop.exit)
    if account.failures or account.ended < account.total:
        raise typer.Exit(Exit.PARTIAL)
