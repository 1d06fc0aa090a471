"""Options that several subcommands share, declared once."""

from __future__ import annotations

from typing import Annotated

import typer

from protokv.config import CONFIGS
from protokv_cli.completion import values
from protokv_cli.output import Format

Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="NAME_OR_FOLDER",
        help="Model: a hub name, a local folder, or protokv/mini (embedded; -order and -time read more).",
    ),
]
Revision = Annotated[
    str | None,
    typer.Option(
        "--revision",
        metavar="REV",
        help="Branch, tag or commit of a hub model; if left out the one of the state, or the main branch.",
    ),
]
Device = Annotated[
    str,
    typer.Option(
        "--device",
        help="auto, cpu, cuda, cuda:N or mps.",
        autocompletion=values(("auto", "cpu", "cuda", "mps")),
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help="auto, float32, bfloat16 or float16.",
        autocompletion=values(("auto", "float32", "bfloat16", "float16")),
    ),
]
DeviceMap = Annotated[
    str | None,
    typer.Option(
        "--device-map",
        metavar="MAP",
        help="auto or balanced: a model larger than one device, its state with its layers.",
        autocompletion=values(("auto", "balanced")),
    ),
]
Quantization = Annotated[
    str | None,
    typer.Option(
        "--quantization",
        metavar="BITS",
        help="Weights in 4bit or 8bit.",
        autocompletion=values(("4bit", "8bit")),
    ),
]
Memory = Annotated[
    str,
    typer.Option(
        "--memory",
        metavar="NAME",
        help="Memory: " + ", ".join(CONFIGS) + ".",
        autocompletion=values(CONFIGS),
    ),
]
Positions = Annotated[
    str | None,
    typer.Option(
        "--positions",
        help="stream, or compact: what is in memory at consecutive positions, whatever the length of the stream.",
        autocompletion=values(("stream", "compact")),
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="A constant of the memory, such as split=1:5; repeatable."),
]
OutputFormat = Annotated[
    Format,
    typer.Option("--format", "-f", help="Format of stdout; auto: table or, in a pipe, json."),
]
Json = Annotated[bool, typer.Option("--json", help="The same as --format json.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notes on stderr.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]
Timings = Annotated[bool, typer.Option("--timings", help="Say on stderr where the time went; in JSON as a key.")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of everything that is drawn.")]
