"""`protokv ingest`: what its options say, and which of its jobs they ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from protokv.backbones import EMBEDDED, require_model
from protokv.config import DEFAULT
from protokv.errors import ConfigError
from protokv.timings import Timings, stage
from protokv_cli import fleet_options, ingest_options, live, options
from protokv_cli.dry_run import dry_run_one
from protokv_cli.fleet import FleetOptions, ingest_fleet
from protokv_cli.memory import memory_config
from protokv_cli.output import Format, Output
from protokv_cli.parsing import parse_duration, parse_every
from protokv_cli.process import uncollected

if TYPE_CHECKING:
    from protokv.video import Decoder


def ingest(
    sources: ingest_options.Sources = None,
    state: ingest_options.State = None,
    model: options.Model = None,
    revision: options.Revision = None,
    memory: options.Memory = DEFAULT,
    budget: ingest_options.Budget = "6k",
    positions: options.Positions = None,
    settings: options.Settings = None,
    fps: ingest_options.Fps = None,
    start: ingest_options.Start = None,
    duration: ingest_options.Duration = None,
    every: ingest_options.Every = None,
    keep: ingest_options.Keep = None,
    append: ingest_options.Append = False,
    decoder: ingest_options.Decoder = "auto",
    max_frame_pixels: ingest_options.MaxFramePixels = None,
    for_: live.For = None,
    until: live.Until = None,
    follow: live.Follow = False,
    stall: live.Stall = None,
    give_up: live.GiveUp = None,
    on_pressure: live.OnPressure = None,
    inputs: live.Input = None,
    resume: ingest_options.Resume = False,
    force: ingest_options.Force = False,
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
    chunk: ingest_options.Chunk = 1,
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
            require_model(model, revision)
        clock = Timings() if timings else None
        with uncollected(), stage(clock, "imports"):
            from protokv.fleet import Model, Recipe
            from protokv.ingestion import MINUTELY
            from protokv.ingestion.options import IngestOptions
            from protokv_cli.ingest_one import ingest_one

        config = memory_config(
            memory, budget, settings or [], {"seed": seed} | ({"positions": positions} if positions else {})
        )
        reading = live.live_options(
            for_=for_,
            until=until,
            follow=follow,
            stall=stall,
            give_up=give_up,
            on_pressure=on_pressure,
            inputs=inputs,
        )
        interval = None if every is None else parse_every(every)
        if keep is not None and keep > 1 and every is None and not live.is_stream(sources or []):
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
        sampling: dict[str, Any] = {
            "fps": fps,
            "decoder": cast("Decoder", decoder),
            "max_frame_pixels": max_frame_pixels,
        }
        placement: dict[str, Any] = {
            "dtype": dtype,
            "device_map": device_map,
            "quantization": quantization,
            "revision": revision,
        }
        if fleet.wanted:
            alone: dict[str, object] = {
                "--append": append, "--resume": resume, "--start": start, "--duration": duration, "--chunk": chunk > 1,
                "--for": for_, "--until": until, "--follow": follow, "--stall": stall, "--give-up": give_up,
                "--on-pressure": on_pressure, "--input": inputs,
            }  # fmt: skip
            _refuse(alone, "one video", "a fleet continues what it finds by itself, and watches files to their ends")
            _refuse({"--timings": timings}, "one video", "name one of them alone to see where its time goes")
            require_model(model or EMBEDDED, revision)
            recipe = Recipe(
                place=fleet.place,
                model=Model(name=model, **placement),
                config=config,
                every=interval or MINUTELY,
                keep=keep,
                force=force,
                **sampling,
            )
            ingest_fleet(out, fleet, recipe)
            return
        _refuse({"--batch": batch > 1, "--devices": devices}, "several videos", "--device says where one is watched")
        (named,) = fleet.sources
        part: dict[str, Any] = {
            "start_s": 0.0 if start is None else parse_duration(start),
            "duration_s": None if duration is None else parse_duration(duration),
        }
        if dry_run:
            dry_run_one(out, named, config, model, device=device, **placement, **sampling, **part)
            return
        chosen = IngestOptions(
            config=config,
            backbone=model,
            device=device,
            every=interval,
            keep=keep,
            append=append,
            resume=resume,
            overwrite=force,
            live=reading,
            chunk=chunk,
            **placement,
            **sampling,
            **part,
        )
        ingest_one(out, named, state, chosen, clock)


def _refuse(options: Mapping[str, object], whose: str, hint: str) -> None:
    """ConfigError where one of these options is given, which would do nothing."""
    given = [name for name, value in options.items() if value]
    if given:
        raise ConfigError(f"{' and '.join(given)}: for {whose} only", hint=hint)
