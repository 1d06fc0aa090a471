"""`protokv ingest` of several videos: planning and running."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import typer

from protokv.backbones import require_model
from protokv.errors import ConfigError, SourceNotFound
from protokv_cli.fleet_report import FleetReport, check_csv, show_plan
from protokv_cli.options import option
from protokv_cli.output import Output
from protokv_cli.parsing import parse_list
from protokv_cli.process import handle_signals
from protokv_cli.progress import Bar
from protokv_cli.questions import open_lines

if TYPE_CHECKING:
    from protokv.fleet import Job
    from protokv.ingestion import IngestOptions


@dataclass(frozen=True, kw_only=True)
class FleetFlags:
    """How several videos are watched."""

    PANEL: ClassVar[str] = "Many videos"
    listing: str | None = option("--from LIST", "Videos, folders and globs from a file, one a line; - is stdin.")
    workers: int | None = option("--workers COUNT", "Processes, each with the model. Default: one a device.", min=1)
    devices: str | None = option("--devices LIST", "Devices of the workers in turn, such as 0,1 or cpu.")
    ray: str | None = option(
        "--ray ADDRESS",
        "Workers in a Ray cluster: HOST:PORT, or auto for RAY_ADDRESS, one that runs here, or a new one.",
    )
    max_failures: int | None = option("--max-failures COUNT", "Begin no other video after COUNT failures.", min=1)
    failures: Path | None = option("--failures FILE", "Where failures go. Default: failures.jsonl beside the states.")
    csv: Path | None = option("--csv FILE", "Table to write: each video, its state, time, result.")


def ingest_fleet(
    out: Output, sources: list[str], output: str | None, chosen: IngestOptions, fleet: FleetFlags, *, dry_run: bool
) -> None:
    """Ingest every video that is not done yet into the folder `output`; end with exit code 3 if one of them failed."""
    from protokv.fleet import Recipe, preview, run_fleet
    from protokv.ingestion.options import DEFAULT_MODEL

    check_csv(fleet.csv)
    require_model(str(chosen.backbone or DEFAULT_MODEL), chosen.revision)
    recipe = Recipe(place=_place(output), options=chosen)
    jobs = _plan_jobs(out, sources, fleet.listing)
    if dry_run:
        with handle_signals(out.note) as stop:
            show_plan(out, takewhile(lambda _: not stop, preview(jobs, recipe)))
            if stop.exit is not None:
                raise typer.Exit(stop.exit)
        return
    with _open_pool(fleet, recipe) as pool:
        with handle_signals(out.note) as stop, Bar(out, f"0 of {len(jobs)} videos") as bar:
            report = FleetReport(out, jobs, _failures_file(fleet, recipe.place), bar, pool)

            def should_stop() -> bool:
                report.draw()
                return bool(stop)

            for outcome in run_fleet(
                jobs, pool, recipe.place, max_failures=fleet.max_failures, should_stop=should_stop
            ):
                report.add(outcome)
        report.end(stop.exit, fleet.csv)


def _place(output: str | None) -> str:
    """Return the folder or prefix of the states. ConfigError if `-o` names a single state."""
    from protokv.state.forms import find_suffix, is_url

    place = output or "."
    if find_suffix(place) is not None and not Path(place).is_dir():
        raise ConfigError(
            f"several videos become as many states, and {place} is the name of one", hint="name a folder: -o DIR/"
        )
    if is_url(place) or Path(place).is_dir() or not Path(place).exists():
        return place
    raise ConfigError(f"{place} is no folder", hint="name a folder for the states: -o DIR/")


def _plan_jobs(out: Output, sources: list[str], listing: str | None) -> list[Job]:
    from protokv.fleet import plan

    listed: list[str] = []
    if listing == "-":
        listed = list(out.stdin or sys.stdin)
    elif listing is not None:
        try:
            with open_lines(Path(listing)) as lines:
                listed = list(lines)
        except OSError as error:
            raise SourceNotFound(
                f"cannot read {listing}: {error.strerror}", hint="name a file with a video a line"
            ) from None
    jobs = plan([*sources, *filter(None, (line.removeprefix("\ufeff").strip() for line in listed))])
    if not jobs:
        raise ConfigError("there is no video to ingest", hint="protokv ingest VIDEO..., a folder, or --from LIST")
    return jobs


def _open_pool(fleet: FleetFlags, recipe: Any) -> Any:
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


def _failures_file(fleet: FleetFlags, place: str) -> Path:
    from protokv.fleet.states import FAILURES
    from protokv.state.forms import is_url

    return fleet.failures or Path("." if is_url(place) else place, FAILURES)
