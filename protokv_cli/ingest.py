"""`protokv ingest`: one source into one state. Several videos go to `ingest_fleet`."""

from __future__ import annotations

import time
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, cast

import typer

from protokv.backbones import require_model
from protokv.core.settings import check_fps
from protokv.errors import ConfigError
from protokv.memories import DEFAULT, MemoryConfig
from protokv.timings import Timings, stage
from protokv_cli import options
from protokv_cli.ingest_fleet import FleetOptions, ingest_fleet
from protokv_cli.options import option
from protokv_cli.output import Format, Output
from protokv_cli.panels import Panel
from protokv_cli.parsing import (
    parse_budget,
    parse_duration,
    parse_every,
    parse_input,
    parse_instant,
    parse_setting,
    parse_thumbnails,
)
from protokv_cli.process import stopping, uncollected
from protokv_cli.progress import downloads_shown

if TYPE_CHECKING:
    from protokv.ingestion import IngestOptions
    from protokv.video import Decoder as DecoderName


def ingest(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SOURCE",
            # Other users of the machine can read a command line.
            envvar="PROTOKV_SOURCE",
            help="Video file, address of a stream, /dev/video0, or - for a pipe. Several, a folder or a glob: one "
            "state a video. Put an address with a password into PROTOKV_SOURCE.",
        ),
    ] = None,
    state: Annotated[
        str | None,
        option(
            "--output -o STATE",
            "State to write, or a folder for states. Default: SOURCE's name .safetensors, here.",
            Panel.MOST,
        ),
    ] = None,
    model: options.Model = None,
    revision: options.Revision = None,
    system: options.System = None,
    memory: options.Memory = DEFAULT,
    budget: Annotated[str, option("--budget -b COUNT", "Visual tokens to keep, such as 512 or 6k.", Panel.MOST)] = "6k",
    positions: options.Positions = None,
    settings: options.Settings = None,
    fps: Annotated[
        float | None,
        option(
            "--fps NUMBER",
            "Frames a second to sample, at most 240. Default: the rate of the model's training.",
            Panel.MOST,
        ),
    ] = None,
    frame_tokens: options.FrameTokens = None,
    max_pixels: options.MaxPixels = None,
    start: Annotated[str | None, option("--start TIME", "Begin a file here, such as 7:30.", Panel.WATCH)] = None,
    duration: Annotated[
        str | None, option("--duration TIME", "Watch no more of a file than this, such as 2m.", Panel.WATCH)
    ] = None,
    every: Annotated[
        str | None,
        option(
            "--every TIME",
            "Commit on the way: every 30s or 2m of stream time, 500steps, or never. Default: every minute of the "
            "clock, every 5 seconds for a live source.",
            Panel.MOST,
        ),
    ] = None,
    keep: Annotated[
        int | None, option("--keep COUNT", "Keep the last COUNT commits, STATE included, for query --at.", Panel.MOST)
    ] = None,
    append: Annotated[
        bool,
        option("--append", "Watch SOURCE after what STATE has watched; start STATE if there is none.", Panel.WATCH),
    ] = False,
    decoder: Annotated[
        str,
        option(
            "--decoder NAME", "Decoder of files: auto, pyav or decord.", Panel.SPEED, known=("auto", "pyav", "decord")
        ),
    ] = "auto",
    max_frame_pixels: Annotated[
        int | None,
        option("--max-frame-pixels COUNT", "Refuse frames with more pixels. Default: 8K.", Panel.WATCH, min=1),
    ] = None,
    for_: Annotated[
        str | None, option("--for TIME", "End after this much stream time, such as 1h.", Panel.LIVE)
    ] = None,
    until: Annotated[
        str | None, option("--until TIME", "End at a time of day, 18:00, or at a date and time.", Panel.LIVE)
    ] = None,
    stall: Annotated[
        str | None, option("--stall TIME", "A source without a frame for this time is lost. Default: 20s.", Panel.LIVE)
    ] = None,
    give_up: Annotated[
        str | None, option("--give-up TIME", "Stop trying a lost source after this time. Default: never.", Panel.LIVE)
    ] = None,
    on_pressure: Annotated[
        str | None,
        option(
            "--on-pressure WORD",
            "If the model is slower than the stream: drop the oldest frames (default for live sources), or let "
            "the source wait (default for pipes).",
            Panel.LIVE,
        ),
    ] = None,
    inputs: Annotated[
        list[str] | None,
        option("--input NAME=VALUE", "An option for FFmpeg, such as rtsp_transport=udp; repeatable.", Panel.LIVE),
    ] = None,
    resume: Annotated[bool, option("--resume", "Fail if there is no STATE to continue.", Panel.WATCH)] = False,
    force: Annotated[bool, option("--force", "Start over and replace STATE.", Panel.MOST)] = False,
    listing: Annotated[
        str | None,
        option(
            "--from LIST",
            'Videos from a file, one a line: a path, or {"source": ..., "key": ...}; - is stdin.',
            Panel.MANY,
        ),
    ] = None,
    workers: Annotated[
        int | None,
        option("--workers COUNT", "Processes, each with the model. Default: one a device.", Panel.MANY, min=1),
    ] = None,
    devices: Annotated[
        str | None, option("--devices LIST", "Devices of the workers in turn, such as 0,1 or cpu.", Panel.MANY)
    ] = None,
    ray: Annotated[
        str | None,
        option(
            "--ray ADDRESS",
            "Workers in a Ray cluster: HOST:PORT, or auto for RAY_ADDRESS, one that runs here, or a new one.",
            Panel.MANY,
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        option(
            "--dry-run",
            "Say what is to be done and, as an estimate, the time and disk that it takes; write nothing.",
            Panel.MOST,
        ),
    ] = False,
    max_failures: Annotated[
        int | None, option("--max-failures COUNT", "Begin no other video after COUNT failures.", Panel.MANY, min=1)
    ] = None,
    failures: Annotated[
        Path | None,
        option("--failures FILE", "Where failures go. Default: failures.jsonl beside the states.", Panel.MANY),
    ] = None,
    csv: Annotated[
        Path | None, option("--csv FILE", "Table to write: each video, its state, time, result.", Panel.MANY)
    ] = None,
    device: options.Device = "auto",
    dtype: options.Dtype = None,
    device_map: options.DeviceMap = None,
    quantization: options.Quantization = None,
    seed: options.Seed = 0,
    chunk: Annotated[
        int,
        option(
            "--chunk COUNT",
            "Steps that go through the model together; they read the memory as it stood before them.",
            Panel.SPEED,
            min=1,
        ),
    ] = 1,
    thumbnails: options.Thumbnails = "16",
    subtitles: options.Subtitles = "auto",
    transcribe: options.Transcribe = None,
    timings: options.Timings = False,
    fmt: options.OutputFormat = Format.AUTO,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Stream a video, a camera or a pipe through the model into a bounded state.

    The same command again continues an interrupted run. Ctrl-C finishes the step, commits and says how to go on.
    Other processes may query and inspect the last commit meanwhile. A second writer is refused, with exit code 11.

    In a pipe, each event is a JSON line; its type is started, progress, source_lost, source_recovered, frames_dropped,
    words_lost, commit or summary.

    Several videos get a state each, named after the video, and each worker loads the model once. The same command
    again does what is missing or changed. Failures are listed at the end and in failures.jsonl, and the exit code is 3.

    \b
    Examples:
      protokv ingest video.mp4
      protokv ingest lecture.mp4 --every 30s --keep 20
      protokv ingest lecture.mp4 --dry-run
      protokv ingest lecture.mp4 -o exercise.safetensors --start 45:00 --duration 10m
      protokv ingest talk.mkv --subtitles en
      protokv ingest talk.mp4 --transcribe openai/whisper-base
      protokv ingest part2.mp4 -o part1.safetensors --append
      protokv ingest talk.mkv -o talk.safetensors --budget 6k --model Qwen/Qwen2.5-VL-7B-Instruct
      protokv ingest rtsp://camera/1 -o camera.safetensors --keep 100
      ffmpeg -i INPUT -f mpegts - | protokv ingest - -o live.safetensors
      protokv ingest video.mp4 --budget 512 --every 30s --format json
      protokv ingest video.mp4 --memory paper --set split=1:5 --set anchor=average --positions compact
      protokv ingest videos/ -o states/
      protokv ingest --from list.txt -o states/ --dry-run
    """
    out = Output(fmt, as_json=as_json, quiet=quiet, debug=debug, outlives_stdout=True)
    with out.errors():
        if append and state is None:
            raise ConfigError("--append needs the state to append to", hint="name it with -o STATE")
        if fps is not None:
            check_fps(fps)
        if model is not None:
            require_model(model, revision)
        if transcribe is not None:
            require_model(transcribe)
        clock = Timings() if timings else None
        with uncollected(), stage(clock, "imports"):
            from protokv.fleet.plan import is_several
            from protokv.ingestion import IngestOptions, LiveOptions

        chosen = IngestOptions(
            config=_memory_config(memory, budget, settings or [], seed, positions),
            backbone=model,
            device=device,
            dtype=dtype,
            device_map=device_map,
            quantization=quantization,
            revision=revision,
            frame_tokens=frame_tokens,
            max_pixels=max_pixels,
            system=system,
            fps=fps,
            every=None if every is None else parse_every(every),
            keep=keep,
            append=append,
            resume=resume,
            overwrite=force,
            start_s=0.0 if start is None else parse_duration(start),
            duration_s=None if duration is None else parse_duration(duration),
            decoder=cast("DecoderName", decoder),
            max_frame_pixels=max_frame_pixels,
            chunk=chunk,
            thumbnails=parse_thumbnails(thumbnails),
            subtitles=subtitles,
            transcribe=transcribe,
            live=LiveOptions(
                stall_s=None if stall is None else parse_duration(stall),
                give_up_s=None if give_up is None else parse_duration(give_up),
                on_pressure=cast("Any", on_pressure),
                for_s=None if for_ is None else parse_duration(for_),
                until=None if until is None else parse_instant(until, time.time(), ahead=True),
                input=dict(parse_input(one) for one in inputs or ()),
            ),
        )
        fleet = FleetOptions(workers, devices, ray, max_failures, failures, csv)
        sources = sources or []
        if keep is not None and keep > 1 and every is None and not _is_stream(sources):
            out.warn(
                "Warning: --keep keeps commits, and without --every they come once a minute of the clock: "
                "a short run keeps none. Say how often, such as --every 30s"
            )
        if memory == "paper":
            out.note("paper is a reference: the paper's table to the letter. The default, durable, keeps more")
        if listing is not None or len(sources) != 1 or is_several(sources[0]):
            if timings:
                raise ConfigError("--timings: for one video only", hint="name one of them alone to see its times")
            ingest_fleet(out, sources, listing, state, chosen, fleet, dry_run=dry_run)
            return
        if given := fleet.given():
            raise ConfigError(
                f"{' and '.join(given)}: for several videos only",
                hint="name a folder, a glob or --from LIST; --device says where one video is watched",
            )
        if dry_run:
            _dry_run(out, sources[0], chosen)
        else:
            _ingest_one(out, sources[0], state, chosen, clock)


def _memory_config(name: str, budget: str, settings: list[str], seed: int, positions: str | None) -> MemoryConfig:
    """Return the memory that the options describe; `--set` wins over the others. ConfigError."""
    fixed = {"seed": seed} | ({} if positions is None else {"positions": positions})
    base = MemoryConfig.of(name, budget=parse_budget(budget))
    return base.with_fields({**fixed, **dict(map(parse_setting, settings))})


def _is_stream(sources: list[str]) -> bool:
    from protokv.video.address import kind_of

    return len(sources) == 1 and kind_of(sources[0]) != "file"


def _ingest_one(out: Output, source: str, state: str | None, chosen: IngestOptions, clock: Timings | None) -> None:
    """Watch a source, or what is left of it; end with the exit code of a run that was stopped or is not whole."""
    from protokv.ingestion import Started, Summary, ingest
    from protokv.video.address import told
    from protokv_cli.ingest_report import reporting, show_end, show_news, show_start

    opened, name = _open_stdin(source, out.stdin), told(source)
    target = _target_in_folder(source, state)
    with stopping(out.warn) as stop, reporting(out, name, clock) as report, downloads_shown(out):
        events = ingest(opened, target, options=chosen, should_stop=lambda: bool(stop), timings=clock)
        # Closing the generator commits what was watched if something fails here.
        with closing(events):
            with uncollected():
                started = next(events)
            for event in chain((started,), events):
                if isinstance(event, Started):
                    show_start(out, event, name)
                show_news(out, event)
                report(event)
                if isinstance(event, Summary):
                    show_end(out, event, name, stop.exit)


def _open_stdin(source: str, stdin: IO[str] | None) -> str:
    """Return the source, with `-` replaced by the descriptor of the user's stdin in this process."""
    if source != "-":
        return source
    if stdin is None or stdin.isatty():
        raise ConfigError("nothing is piped in", hint="for example: ffmpeg -i ... -f mpegts - | protokv ingest -")
    return f"pipe:{stdin.fileno()}"


def _target_in_folder(source: str, state: str | None) -> str | None:
    """Return where the state goes: into the folder if `-o` names one; None: the name of the source decides."""
    from protokv.fleet.plan import is_place, key_of, target_of
    from protokv.state.form import is_url

    if state is None or not is_place(state):
        return state
    if not is_url(state):
        Path(state).mkdir(parents=True, exist_ok=True)
    return target_of(state, key_of(source))


def _dry_run(out: Output, source: str, chosen: IngestOptions) -> None:
    """Try a few steps of a video, and show what all of it would take."""
    from protokv.backbones import load_backbone
    from protokv.ingestion.estimate import estimate
    from protokv.ingestion.run import find_words
    from protokv.video import open_source
    from protokv.video.derived import Part
    from protokv_cli.ingest_report import show_estimate

    backbone = chosen.prompted(load_backbone(**chosen.new_model, **chosen.frames))
    with open_source(source, chosen.decoder, max_pixels=chosen.max_frame_pixels, isolate=True) as opened:
        part = Part(opened, chosen.start_s, chosen.duration_s) if chosen.is_part else opened
        show_estimate(out, estimate(part, backbone, chosen, find_words(source, part, chosen)))
