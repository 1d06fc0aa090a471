"""`protokv ingest`: one source into one state. Several videos go to `ingest_fleet`."""

from __future__ import annotations

import re
import shlex
import sys
from contextlib import closing, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from protokv.errors import ConfigError, SourceUnreadable
from protokv.state.moments import parse_duration
from protokv.timings import Timings, time_stage
from protokv_cli.hooks import SubprocessHook
from protokv_cli.ingest_fleet import FleetFlags, ingest_fleet
from protokv_cli.options import (
    SUBTITLES_HELP,
    TOP_PANEL,
    Flags,
    MemoryFlags,
    TimedOutputFlags,
    WatchModelFlags,
    check_options,
    list_set_options,
    make_kwargs,
    option,
    read_variable_lines,
)
from protokv_cli.output import Output
from protokv_cli.parsing import (
    find_calibrations,
    parse_every,
    parse_list,
    parse_pair,
    parse_share,
    parse_steps,
)
from protokv_cli.process import handle_signals

if TYPE_CHECKING:
    from protokv.ingestion import IngestOptions

# A page that shows a video, which yt-dlp reads.
_PAGE = re.compile(
    r"https?://([a-z]+\.)?(youtube\.com|youtu\.be|vimeo\.com|twitch\.tv)/", re.IGNORECASE
)

# Other users of the machine can read a command line.
_TEXT = """Video file, address of a stream, /dev/video0, or - for a pipe. Several, or a folder: \
a state each.
Put an address with a password into PROTOKV_SOURCE."""
_SOURCE = typer.Argument(
    metavar="SOURCE",
    envvar="PROTOKV_SOURCE",
    show_envvar=False,
    help=_TEXT,
    callback=read_variable_lines,
)
_Sources = Annotated[list[str] | None, _SOURCE]


class _StateFlags(Flags, panel="State"):
    """Which state is written, when and how."""

    state: str | None = option(
        "--output -o STATE", "State or folder to write. Default: here, by SOURCE.", TOP_PANEL
    )
    every: str | None = option(
        "--every TIME", "Commit each 30s or 500steps; or never.", TOP_PANEL, parse=parse_every
    )
    keep: int | None = option(
        "--keep COUNT", "Keep the last COUNT commits, STATE included, for query --at.", TOP_PANEL
    )
    overwrite: bool = option("--force", "Start over and replace STATE.", TOP_PANEL)
    dry_run: bool = option(
        "--dry-run", "Estimate what it would take, and write nothing.", TOP_PANEL
    )
    append: bool = option("--append", "Watch SOURCE after what STATE has watched, if there is one.")


class _SourceFlags(Flags, panel="What to watch"):
    """What of a source enters the stream."""

    start_s: str = option(
        "--start TIME", "Begin a file here, such as 7:30.", default="0", parse=parse_duration
    )
    duration_s: str | None = option(
        "--duration TIME", "Watch no more of a file than this.", parse=parse_duration
    )
    subtitles: str = option("--subtitles FILE|LANG", SUBTITLES_HELP, default="auto")
    system: str | None = option(
        "--system TEXT", "A system prompt, which the model reads before the video."
    )
    max_frame_pixels: int | None = option(
        "--max-frame-pixels COUNT", "Refuse larger frames. Default: 8K.", min=1
    )
    decoder: str = option(
        "--decoder NAME",
        "Decoder of files: auto, pyav or decord.",
        default="auto",
    )
    chunk: str = option(
        "--chunk COUNT|auto", "Steps together; auto: 4 of a file.", default="1", parse=parse_steps
    )


_ASKED = "Questions while it watches"
_HOW = ("every_s", "choices", "on_change", "evidence", "at_most_wrong")
_ALONE = ("append", "start_s", "duration_s", "chunk", "timings", "questions", "command", *_HOW)
_OF_FLEETS = ("listing", "workers", "devices", "max_failures")
# The options that a run does not take, by what it watches.
_NOT_FOR = {
    "one source": _OF_FLEETS,
    "several videos": (*_ALONE, "for_s", "stall_s", "give_up_s", "on_pressure", "input"),
    "several live sources": (*_ALONE, *_OF_FLEETS, "dry_run"),
}


class _LiveFlags(Flags, panel="Live sources"):
    """What is asked meanwhile, and what to do about a source that waits, is lost or has no end."""

    questions: list[str] | None = option(
        "--ask QUESTION", "Ask this again and again; repeatable.", _ASKED
    )
    every_s: str = option(
        "--ask-every TIME", "How often (stream time).", _ASKED, default="10s", parse=parse_duration
    )
    on_change: bool = option("--on-change", "Only answers that differ from the last one.", _ASKED)
    choices: str | None = option(
        "--choices A,B", "Answer with the likeliest of these.", _ASKED, parse=parse_list
    )
    evidence: bool = option("--evidence", "Say the times that each answer stood on.", _ASKED)
    at_most_wrong: str | None = option(
        "--at-most-wrong SHARE", "As for query.", _ASKED, parse=parse_share
    )
    command: str | None = option(
        "--exec COMMAND", "Run this for each answer, which is JSON on its stdin.", _ASKED
    )
    for_s: str | None = option(
        "--for TIME", "End after this much stream time, such as 1h.", parse=parse_duration
    )
    stall_s: str | None = option(
        "--stall TIME", "Lost if no frame comes so long. Default: 20s.", parse=parse_duration
    )
    give_up_s: str | None = option(
        "--give-up TIME", "Try a lost source so long. Default: ever.", parse=parse_duration
    )
    on_pressure: str | None = option(
        "--on-pressure WORD",
        "Too slow: drop old frames (live), or wait (pipes).",
    )
    input: list[str] | None = option(
        "--input NAME=VALUE",
        "For FFmpeg, such as rtsp_transport=udp; repeatable.",
        parse=lambda texts: dict(
            parse_pair(text, "input", "--input rtsp_transport=udp") for text in texts
        ),
    )


def ingest(
    sources: _Sources = None,
    *,
    state: _StateFlags,
    model: WatchModelFlags,
    memory: MemoryFlags,
    watch: _SourceFlags,
    live: _LiveFlags,
    fleet: FleetFlags,
    output: TimedOutputFlags,
) -> None:
    """Stream a video, a camera or a pipe through the model into a bounded state.

    The same command again continues an interrupted run. Ctrl-C finishes the step, commits and says
    how to go on. Other processes may query and inspect the last commit meanwhile. A second writer
    is refused, with exit code 11.

    In a pipe, each event is a JSON line with its type: started, progress, source_lost, commit and
    others, last summary.

    With --ask, questions are answered while it watches, as events: where stream time passes
    multiples of --ask-every.

    Several videos get a state each, named after the video. The same command again does what is
    missing or changed. Failures are listed at the end and in failures.jsonl, and the exit code is
    3.

    ```sh
    protokv ingest video.mp4
    protokv ingest talk.mkv -o talk.safetensors --budget 6k --model Qwen/Qwen2.5-VL-7B-Instruct
    protokv ingest lecture.mp4 -o part.safetensors --start 45:00 --duration 10m --every 30s --keep 9
    protokv ingest part2.mp4 -o part1.safetensors --append
    protokv ingest rtsp://camera/1 --ask "Is someone at the door?" --choices yes,no --on-change
    ffmpeg -i INPUT -f mpegts - | protokv ingest - -o live.safetensors
    protokv ingest --from list.txt -o states/ --dry-run
    ```
    """
    out = output.open(outlives_stdout=True)
    with out.errors():
        if state.append and state.state is None:
            raise ConfigError("--append needs the state to append to", hint="name it with -o STATE")
        model.check()
        clock = Timings() if output.timings else None
        with time_stage(clock, "imports"):
            from protokv.fleet.plan import is_fleet_source
            from protokv.ingestion import IngestOptions, LiveOptions, StandingQuestion
            from protokv.video.address import LIVE, STREAMED_SOURCES, source_kind
            from protokv.words.find import names_subtitle_file

        sources = sources or []
        many = fleet.listing is not None or len(sources) != 1 or is_fleet_source(sources[0])
        # Alone, what has an address of http is a video that ends.
        kinds = set(map(source_kind, sources))
        are_live = fleet.listing is None and kinds & LIVE and kinds.issubset(STREAMED_SOURCES)
        several = "several live sources" if are_live else "several videos"
        what = several if many else "one source"
        alone = [
            name
            for flags in (state, watch, live, fleet, output)
            for name in list_set_options(flags, *_NOT_FOR[what])
        ]
        alone += ["--subtitles FILE"] * (many and names_subtitle_file(watch.subtitles))
        further = list_set_options(live, *_HOW, "command")
        check_options(
            (
                alone,
                f"{' and '.join(alone)}: not for {what}",
                "leave that out, or give what takes it a run of its own",
            ),
            (
                further and not live.questions,
                f"{' and '.join(further)}: nothing is asked",
                "add --ask QUESTION",
            ),
        )
        waiting = make_kwargs(live, "questions", "command")
        how = {name: waiting.pop(name) for name in _HOW if name in waiting}
        if "at_most_wrong" in how:
            how["calibrations"] = str(find_calibrations())
        chosen = IngestOptions(
            config=memory.config() if memory.is_chosen else None,
            backbone=model.model,
            fps=model.fps,
            thumbnails=memory.thumbnails,
            ask=tuple(StandingQuestion(text, **how) for text in live.questions or ()),
            live=LiveOptions(**waiting),
            **make_kwargs(state, "state", "dry_run"),
            **make_kwargs(watch),
            **model.loading,
        )
        if many and are_live:
            from protokv_cli.ingest_live import ingest_live

            ingest_live(out, {one: _open_stdin(one) for one in sources}, state.state or ".", chosen)
            return
        if many:
            ingest_fleet(out, sources, state.state, chosen, fleet, dry_run=state.dry_run)
            return
        if _PAGE.match(sources[0]):
            raise SourceUnreadable(
                f"{sources[0]} is a page, not a video",
                hint=f"yt-dlp -o - {shlex.quote(sources[0])} | protokv ingest -",
            )
        if state.dry_run:
            from protokv.ingestion.estimate import estimate_ingest
            from protokv_cli.ingest_report import show_estimate

            found = estimate_ingest(sources[0], chosen)
            out.note_model(model.model)
            show_estimate(out, found, chosen.memory.budget)
        else:
            _ingest_one(out, sources[0], state.state, chosen, clock, live.command)


def _ingest_one(
    out: Output,
    source: str,
    state: str | None,
    chosen: IngestOptions,
    clock: Timings | None,
    command: str | None,
) -> None:
    """Watch a source, or what is left of it; end with the exit code of a run that was stopped or is
    not whole.
    """
    from protokv.fleet.plan import locate_fleet_state, make_video_key
    from protokv.ingestion import IngestSummary, ingest_events
    from protokv.state.folder import names_many_states
    from protokv.video.address import name_source
    from protokv_cli.ingest_report import EventPrinter

    opened = _open_stdin(source)
    name = name_source(source)
    # The name of the source decides where no state is named.
    target = (
        state
        if state is None or not names_many_states(state)
        else locate_fleet_state(state, make_video_key(source))
    )
    with (
        handle_signals(out.note) as stop,
        SubprocessHook(command, partial(out.note, once=True)) if command else nullcontext() as hook,
        EventPrinter(out, name, chosen, clock) as report,
        # Closing the generator commits what was watched if something fails here.
        closing(
            ingest_events(
                opened, target, options=chosen, should_stop=lambda: bool(stop), timings=clock
            )
        ) as events,
    ):
        report.hook = hook
        written = ""
        for event in events:
            report.follow(event, name)
            if isinstance(event, IngestSummary):
                written = event.state
    report.end(written, stop.exit)


def _open_stdin(source: str) -> str:
    """Return the source, with `-` replaced by the descriptor of the user's stdin."""
    if source == "-" and sys.stdin.isatty():
        raise ConfigError(
            "nothing is piped in", hint="for example: ffmpeg -i ... -f mpegts - | protokv ingest -"
        )
    return f"pipe:{sys.stdin.fileno()}" if source == "-" else source
