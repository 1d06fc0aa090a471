"""`protokv ingest` of one source: its run, what is said before and after it, and the exit code.

Imports the library whole, so it is imported when a run begins.
"""

from __future__ import annotations

import shlex
from contextlib import closing
from itertools import chain

import typer

from protokv.ingestion import Started, Summary, ingest
from protokv.ingestion.options import IngestOptions
from protokv.timings import Timings
from protokv.video.address import told
from protokv_cli import live
from protokv_cli.beyond import warn_of_source
from protokv_cli.exits import Exit
from protokv_cli.loading import downloads_shown
from protokv_cli.output import Output
from protokv_cli.process import uncollected
from protokv_cli.progress import reporting
from protokv_cli.signals import stopping
from protokv_cli.tables import bytes_text, time_text


def ingest_one(out: Output, named: str, target: str | None, options: IngestOptions, clock: Timings | None) -> None:
    """Watch a source, or what is left of it. Ends the program with its code where it was stopped or is not whole.

    Args:
        out: where to.
        named: the source, as the user wrote it.
        target: where the state goes, None: the name of the source says.
        options: how to watch the source.
        clock: adds up where the time went; None: nowhere.
    """
    given, source = live.piped(named, out.stdin), told(named)
    with stopping(out.warn) as stop, reporting(out, source, clock) as report, downloads_shown(out):
        events = ingest(given, target, options=options, should_stop=lambda: bool(stop), timings=clock)
        # Closed at once where something fails here: it commits what was watched.
        with closing(events):
            with uncollected():
                started = next(events)
            for event in chain((started,), events):
                if isinstance(event, Started):
                    _begin(out, event, source, "-" if named == "-" else source)
                if news := live.news_of(event):
                    out.warn(news)
                report(event)
                if isinstance(event, Summary):
                    _close(out, event, source, stop.exit)


def _begin(out: Output, started: Started, source: str, argument: str) -> None:
    """Say where the run begins, if it is not at the beginning."""
    if not started.locked:
        out.note(f"nothing keeps others from writing {started.state} at the same time: there are no locks there")
    if started.how == "finished":
        out.note(f"{started.state} has watched {source} to its end; there is nothing to do")
    elif started.how != "started":
        how = "continuing" if started.how == "continued" else "appending to"
        out.note(f"{how} {started.state} at {time_text(started.stream_time_s)}")
    else:
        most = "grows with the stream" if started.most_bytes is None else f"about {bytes_text(started.most_bytes)}"
        out.note(f"state: {bytes_text(started.state_bytes)} in memory; on disk {most}")
    if started.beyond_model and started.how != "finished":
        warn_of_source(out, source, argument)
    if started.source_fps and started.fps > 1.01 * started.source_fps:
        out.warn(
            f"Warning: {source} has {started.source_fps:g} frames a second, and --fps {started.fps:g} "
            "shows the model some of them more than once"
        )


def _close(out: Output, summary: Summary, source: str, asked: Exit | None) -> None:
    """Say what to do next, and end with the code that tells what happened."""
    if asked is not None:
        at = time_text(summary.stream_time_s)
        out.warn(f"stopped at {at}; {summary.state} is committed. Continue with the same command.")
        raise typer.Exit(asked)
    if summary.damaged:
        out.warn(f"Error: {source}: {summary.damage}")
        out.warn(f"Hint: what could be read is in {summary.state}; ask it, or mend the video and use --force")
        raise typer.Exit(Exit.PARTIAL)
    if summary.grows:
        out.warn(f"Note: {source} is being written to; what there was of it until now is in {summary.state}.")
        out.warn("Hint: run the same command again to go on, and once more when the file is whole")
        raise typer.Exit(Exit.PARTIAL)
    out.note(f'ask it: protokv query {shlex.quote(summary.state)} "..."')
