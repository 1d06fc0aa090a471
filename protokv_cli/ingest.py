"""`protokv ingest`: a video in, a state out."""

from __future__ import annotations

import shlex
from contextlib import closing
from itertools import chain
from typing import TYPE_CHECKING, Annotated, cast

import typer

from protokv.backbones import require_model
from protokv.config import DEFAULT
from protokv.errors import ConfigError
from protokv.timings import Timings, stage
from protokv_cli import fleet_options, live, options
from protokv_cli.beyond import warn_of_source
from protokv_cli.completion import values
from protokv_cli.dry_run import show_estimate
from protokv_cli.exits import Exit
from protokv_cli.fleet import FleetOptions, ingest_fleet
from protokv_cli.loading import downloads_shown
from protokv_cli.memory import memory_config
from protokv_cli.output import Format, Output
from protokv_cli.parsing import parse_duration, parse_every
from protokv_cli.process import uncollected
from protokv_cli.signals import stopping
from protokv_cli.tables import bytes_text, time_text

if TYPE_CHECKING:
    from protokv.ingestion import Started, Summary
    from protokv.video import Decoder


def ingest(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SOURCE...",
            help="Video file, address of a stream, /dev/video0, or - for a pipe; several, a folder, a glob: one state "
            "a video.",
        ),
    ] = None,
    state: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="STATE",
            help="State to write, or a folder for several; SOURCE's name .safetensors, here.",
        ),
    ] = None,
    model: options.Model = None,
    memory: options.Memory = DEFAULT,
    budget: Annotated[
        str,
        typer.Option("--budget", "-b", help="Visual tokens kept, such as 512 or 6k."),
    ] = "6k",
    positions: options.Positions = None,
    settings: options.Settings = None,
    fps: Annotated[
        float | None,
        typer.Option("--fps", help="Frames a second to sample, at most 240; what the model was trained at."),
    ] = None,
    start: Annotated[
        str | None, typer.Option("--start", metavar="TIME", help="Of a file, begin here, such as 7:30.")
    ] = None,
    duration: Annotated[
        str | None, typer.Option("--duration", metavar="TIME", help="Of a file, watch no more than this, such as 2m.")
    ] = None,
    every: Annotated[
        str | None,
        typer.Option(
            "--every",
            help="Commit on the way: every 30s or 2m of stream time, 500steps, or never; "
            "every minute of the clock if left out, every 5 seconds of a live source.",
        ),
    ] = None,
    keep: Annotated[
        int | None,
        typer.Option("--keep", metavar="N", help="Keep the last N commits, STATE included, for query --at."),
    ] = None,
    append: Annotated[
        bool,
        typer.Option("--append", help="Watch SOURCE behind what STATE has watched; start STATE if there is none."),
    ] = False,
    decoder: Annotated[
        str,
        typer.Option(
            "--decoder",
            help="Of files: auto, pyav or decord.",
            autocompletion=values(("auto", "pyav", "decord")),
        ),
    ] = "auto",
    max_frame_pixels: Annotated[
        int | None,
        typer.Option("--max-frame-pixels", metavar="N", min=1, help="Refuse frames with more pixels; 8K by default."),
    ] = None,
    for_: live.For = None,
    until: live.Until = None,
    follow: live.Follow = False,
    stall: live.Stall = None,
    give_up: live.GiveUp = None,
    on_pressure: live.OnPressure = None,
    inputs: live.Input = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Insist that STATE exists and continues; without it, that is tried."),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Start over and replace STATE.")] = False,
    listing: fleet_options.Listing = None,
    workers: fleet_options.Workers = None,
    devices: fleet_options.Devices = None,
    batch: fleet_options.Batch = 1,
    ray: fleet_options.Ray = None,
    dry_run: fleet_options.DryRun = False,
    max_failures: fleet_options.MaxFailures = None,
    failures: fleet_options.Failures = None,
    device: options.Device = "auto",
    dtype: options.Dtype = None,
    device_map: options.DeviceMap = None,
    quantization: options.Quantization = None,
    seed: options.Seed = 0,
    chunk: Annotated[
        int,
        typer.Option(
            "--chunk",
            metavar="N",
            min=1,
            help="Steps that go through the model at once; they read the memory as it stood before them.",
        ),
    ] = 1,
    timings: options.Timings = False,
    fmt: options.OutputFormat = Format.AUTO,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Stream a video, a camera or a pipe through the model into a bounded state.

    The same command again continues an interrupted run. Ctrl-C finishes the step, commits and says how to go on.
    Other processes may query and inspect the last commit meanwhile. A second writer is refused, with exit code 11.

    Of several videos each has a state of its own, named after the video, and each worker loads the model once. The
    same command again does what is missing or changed. What fails is listed at the end and in failures.jsonl, and
    ends in exit code 3.

    \b
    Examples:
      protokv ingest video.mp4
      protokv ingest lecture.mp4 --every 30s --keep 20
      protokv ingest lecture.mp4 --dry-run
      protokv ingest lecture.mp4 -o exercise.safetensors --start 45:00 --duration 10m
      protokv ingest part2.mp4 -o part1.safetensors --append
      protokv ingest talk.mkv -o talk.safetensors --budget 6k --model Qwen/Qwen2.5-VL-7B-Instruct
      protokv ingest rtsp://camera/1 -o camera.safetensors --keep 100
      ffmpeg -i INPUT -f mpegts - | protokv ingest - -o live.safetensors
      protokv ingest video.mp4 --budget 512 --every 30s --json
      protokv ingest video.mp4 --memory paper --set split=1:5 --set anchor=average --positions compact
      protokv ingest videos/ -o states/
      protokv ingest --from list.txt -o states/ --dry-run
    """
    out = Output(fmt, as_json=as_json, quiet=quiet, debug=debug, outlives_stdout=True)
    with out.errors():
        if append and state is None:
            raise ConfigError("which state to append to is not said", hint="name it with -o STATE")
        if model is not None:
            require_model(model)
        clock = Timings() if timings else None
        with uncollected(), stage(clock, "imports"):
            from protokv.fleet import Model, Recipe
            from protokv.ingestion import MINUTELY, Started, Summary
            from protokv.ingestion import ingest as ingest_source
            from protokv_cli.progress import reporting

        config = memory_config(
            memory, budget, settings or [], {"seed": seed} | ({"positions": positions} if positions else {})
        )
        options = live.live_options(
            for_=for_,
            until=until,
            follow=follow,
            stall=stall,
            give_up=give_up,
            on_pressure=on_pressure,
            inputs=inputs,
        )
        interval = None if every is None else parse_every(every)
        if keep is not None and keep > 1 and every is None:
            out.warn(
                "Warning: --keep keeps commits, and without --every they come once a minute of the clock: "
                "a short run keeps none. Say how often, such as --every 30s"
            )
        fleet = FleetOptions(
            sources=sources or [],
            output=state,
            listing=listing,
            workers=workers,
            devices=devices or (None if device == "auto" else device),
            batch=batch,
            ray=ray,
            dry_run=dry_run,
            max_failures=max_failures,
            failures=failures,
        )
        if fleet.wanted:
            if append or resume or start is not None or duration is not None:
                raise ConfigError(
                    "--append, --resume, --start and --duration are for one video",
                    hint="a fleet continues what it finds by itself",
                )
            model_of_all = Model(name=model, dtype=dtype, device_map=device_map, quantization=quantization)
            recipe = Recipe(
                place=fleet.place,
                model=model_of_all,
                config=config,
                fps=fps,
                every=interval or MINUTELY,
                keep=keep,
                decoder=cast("Decoder", decoder),
                max_frame_pixels=max_frame_pixels,
                force=force,
            )
            ingest_fleet(out, fleet, recipe)
            return
        if dry_run:
            from protokv.backbones import EMBEDDED, load_backbone
            from protokv.ingestion.estimate import estimate
            from protokv.video import open_source

            backbone = load_backbone(
                model or EMBEDDED,
                device=device,
                dtype=dtype or "auto",
                device_map=device_map,
                quantization=quantization,
            )
            opened = open_source(fleet.sources[0], cast("Decoder", decoder), max_pixels=max_frame_pixels, isolate=True)
            with opened:
                if start is not None or duration is not None:
                    from protokv.video.part import Part

                    length_s = None if duration is None else parse_duration(duration)
                    opened = Part(opened, parse_duration(start or "0"), length_s)
                show_estimate(out, estimate(opened, backbone, config, fps=fps))
            return
        (named,) = fleet.sources
        given, source = live.piped(named, out.stdin), live.label(named)
        with stopping(out.warn) as stop, reporting(out, source, clock) as report, downloads_shown(out):
            events = ingest_source(
                given,
                state,
                config,
                backbone=model,
                fps=fps,
                every=interval,
                keep=keep,
                append=append,
                resume=resume,
                overwrite=force,
                decoder=cast("Decoder", decoder),
                max_frame_pixels=max_frame_pixels,
                should_stop=lambda: bool(stop),
                device=device,
                dtype=dtype,
                device_map=device_map,
                quantization=quantization,
                start_s=0.0 if start is None else parse_duration(start),
                duration_s=None if duration is None else parse_duration(duration),
                live=options,
                chunk=chunk,
                timings=clock,
            )
            # Closed at once where something fails here: it commits what was watched.
            with closing(events):
                with uncollected():
                    started = next(events)
                for event in chain((started,), events):
                    if isinstance(event, Started):
                        _begin(out, event, source)
                    if news := live.news_of(event):
                        out.note(news)
                    report(event)
                    if isinstance(event, Summary):
                        _close(out, event, source, stop.exit)


def _begin(out: Output, started: Started, source: str) -> None:
    """Say where the run begins, if it is not at the beginning."""
    if not started.locked:
        out.note(f"nothing keeps others from writing {started.state} at the same time: there are no locks there")
    if started.how == "finished":
        out.note(f"{started.state} has watched {source} to its end; there is nothing to do")
    elif started.how != "started":
        how = "continuing" if started.how == "continued" else "appending to"
        out.note(f"{how} {started.state} at {time_text(started.stream_time_s)}")
    else:
        most = "grows with the stream" if started.most_bytes is None else f"at most {bytes_text(started.most_bytes)}"
        out.note(f"state: {bytes_text(started.state_bytes)} in memory; on disk {most}")
    if started.beyond_model and started.how != "finished":
        warn_of_source(out, source)
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
