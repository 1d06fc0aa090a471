"""`protokv ingest` of several live sources: one process watches them, and each has its state."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from protokv.fleet.plan import list_video_jobs, locate_fleet_state
from protokv.ingestion import IngestOptions, ingest_together
from protokv.state.commit import explain_write_errors
from protokv.state.store import is_remote_state
from protokv.texts import format_count
from protokv.video.address import name_source
from protokv_cli.ingest_fleet import check_place
from protokv_cli.ingest_report import EventPrinter
from protokv_cli.output import Output
from protokv_cli.process import handle_signals


def ingest_live(out: Output, sources: dict[str, str], place: str, chosen: IngestOptions) -> None:
    """Watch live sources into the folder `place` until they end or the user stops; end with the
    exit code of the signal, or 3 if one of them failed. `sources` are what is opened, by what the
    user named.
    """
    check_place(place)
    jobs = list_video_jobs(sources, live=True)
    if not is_remote_state(place):
        with explain_write_errors(Path(place)):
            Path(place).mkdir(parents=True, exist_ok=True)
    states = {locate_fleet_state(place, job.key): job.source for job in jobs}
    opened = {state: sources[source] for state, source in states.items()}
    with (
        handle_signals(out.note) as stop,
        EventPrinter(out, format_count(len(states), "source"), chosen) as report,
        # Closing it commits what was watched if something fails here.
        closing(ingest_together(opened, chosen, lambda: bool(stop))) as found,
    ):
        for state, event in found:
            source = name_source(states[state])
            if isinstance(event, Exception):
                report.fail(event, source)
            else:
                report.follow(event, source)
    report.end(place, stop.exit)
