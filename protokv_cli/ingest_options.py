"""Options of `protokv ingest` for a video and its state, declared once."""

from __future__ import annotations

from typing import Annotated

import typer

from protokv_cli.completion import values

Sources = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SOURCE...",
        # What stands on a command line, other users of the machine can read.
        envvar="PROTOKV_SOURCE",
        help="Video file, address of a stream, /dev/video0, or - for a pipe; several, a folder, a glob: one state "
        "a video. An address with a password is better in PROTOKV_SOURCE.",
    ),
]
State = Annotated[
    str | None,
    typer.Option(
        "--output",
        "-o",
        metavar="STATE",
        help="State to write, or a folder for several; SOURCE's name .safetensors, here.",
    ),
]
Budget = Annotated[
    str,
    typer.Option("--budget", "-b", help="Visual tokens kept, such as 512 or 6k."),
]
Fps = Annotated[
    float | None,
    typer.Option("--fps", help="Frames a second to sample, at most 240; what the model was trained at."),
]
Start = Annotated[str | None, typer.Option("--start", metavar="TIME", help="Of a file, begin here, such as 7:30.")]
Duration = Annotated[
    str | None, typer.Option("--duration", metavar="TIME", help="Of a file, watch no more than this, such as 2m.")
]
Every = Annotated[
    str | None,
    typer.Option(
        "--every",
        help="Commit on the way: every 30s or 2m of stream time, 500steps, or never; "
        "every minute of the clock if left out, every 5 seconds of a live source.",
    ),
]
Keep = Annotated[
    int | None,
    typer.Option("--keep", metavar="N", help="Keep the last N commits, STATE included, for query --at."),
]
Append = Annotated[
    bool,
    typer.Option("--append", help="Watch SOURCE behind what STATE has watched; start STATE if there is none."),
]
Decoder = Annotated[
    str,
    typer.Option(
        "--decoder",
        help="Of files: auto, pyav or decord.",
        autocompletion=values(("auto", "pyav", "decord")),
    ),
]
MaxFramePixels = Annotated[
    int | None,
    typer.Option("--max-frame-pixels", metavar="N", min=1, help="Refuse frames with more pixels; 8K by default."),
]
Resume = Annotated[
    bool,
    typer.Option("--resume", help="Insist that STATE exists and continues; without it, that is tried."),
]
Force = Annotated[bool, typer.Option("--force", help="Start over and replace STATE.")]
Chunk = Annotated[
    int,
    typer.Option(
        "--chunk",
        metavar="N",
        min=1,
        help="Steps that go through the model at once; they read the memory as it stood before them.",
    ),
]
