"""What `ingest` offers for sources that are not files: its options, and what is said when such a source goes and comes.

An address is shown without its secrets wherever it is shown.
"""

from __future__ import annotations

import time
from typing import IO, TYPE_CHECKING, Annotated, Literal, cast

import typer

from protokv.errors import ConfigError
from protokv_cli.parsing import parse_duration, parse_instant
from protokv_cli.tables import time_text

if TYPE_CHECKING:
    from protokv.ingestion import Event, LiveOptions

For = Annotated[str | None, typer.Option("--for", metavar="TIME", help="End after so much of the stream, such as 1h.")]
Until = Annotated[
    str | None, typer.Option("--until", metavar="TIME", help="End at a time of day, 18:00, or at a date and time.")
]
Follow = Annotated[
    bool, typer.Option("--follow", help="Read a file on while it grows, until nothing is added for --stall.")
]
Stall = Annotated[
    str | None,
    typer.Option("--stall", metavar="TIME", help="Without a frame for so long a source is lost; 20s if left out."),
]
GiveUp = Annotated[
    str | None,
    typer.Option("--give-up", metavar="TIME", help="Try a lost source again for so long; for ever if left out."),
]
OnPressure = Annotated[
    str | None,
    typer.Option(
        "--on-pressure",
        metavar="drop|wait",
        help="If the model is slower than the stream: drop the oldest frames, which is the default of live sources, "
        "or let the source wait, which is that of pipes.",
    ),
]
Input = Annotated[
    list[str] | None,
    typer.Option("--input", metavar="NAME=VALUE", help="An option for FFmpeg, such as rtsp_transport=udp; repeatable."),
]


def live_options(
    *,
    for_: str | None,
    until: str | None,
    follow: bool,
    stall: str | None,
    give_up: str | None,
    on_pressure: str | None,
    inputs: list[str] | None,
) -> LiveOptions:
    """The options as the library has them. ConfigError where one makes no sense."""
    from protokv.ingestion import LiveOptions

    return LiveOptions(
        stall_s=None if stall is None else parse_duration(stall),
        give_up_s=None if give_up is None else parse_duration(give_up),
        on_pressure=cast('Literal["drop", "wait"] | None', on_pressure),
        for_s=None if for_ is None else parse_duration(for_),
        until=None if until is None else parse_instant(until, time.time(), ahead=True),
        follow=follow,
        input=dict(_pair(one) for one in inputs or ()),
    )


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise ConfigError(f"input: expected NAME=VALUE, got {text!r}", hint="for example --input rtsp_transport=udp")
    return name, value


def is_stream(sources: list[str]) -> bool:
    """Whether there is one source, and it is no file."""
    from protokv.video.address import kind_of

    return len(sources) == 1 and kind_of(sources[0]) != "file"


def piped(source: str, stdin: IO[str] | None) -> str:
    """The source, with `-` as the descriptor that the user's stdin has in this process."""
    if source != "-":
        return source
    if stdin is None or stdin.isatty():
        raise ConfigError("nothing is piped in", hint="for example: ffmpeg -i ... -f mpegts - | protokv ingest -")
    return f"pipe:{stdin.fileno()}"


def news_of(event: Event) -> str | None:
    """What happened to a live source, in a line; None of any other event."""
    from protokv.ingestion import FramesDropped, SourceLost, SourceRecovered

    if isinstance(event, SourceLost):
        return f"{event.source} is lost at {time_text(event.stream_time_s)}: {event.why}; trying again"
    if isinstance(event, SourceRecovered):
        return f"{event.source} is back at {time_text(event.stream_time_s)}, after {time_text(event.gap_s)}"
    if isinstance(event, FramesDropped):
        return (
            f"frames are dropped: {event.stream_fps:.1f} a second come, the model takes {event.watched_fps:.1f}; "
            "sample fewer with --fps, or let the camera send smaller ones"
        )
    return None
