"""Options that several subcommands share, declared once, and the completion of their values in a shell."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from glob import escape as glob_escape
from glob import glob
from pathlib import Path
from typing import Annotated, Any

import typer

from protokv.config import CONFIGS
from protokv.errors import use_one_of
from protokv_cli.output import Format
from protokv_cli.panels import Panel

# Those of `protokv.storage.form.FORMS`, which imports torch.
STATE_SUFFIXES = (".safetensors", ".zarr", ".pt")
_COMPLETE = "_PROTOKV_COMPLETE"


class Shell(StrEnum):
    """A shell with a completion script."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"
    POWERSHELL = "powershell"


def choice(name: str, known: Sequence[str], text: str, *, panel: Panel, metavar: str = "NAME") -> Any:
    """Return an option whose known values a shell completes."""

    def complete(incomplete: str) -> list[str]:
        return [value for value in known if value.startswith(incomplete)]

    return typer.Option(name, metavar=metavar, help=text, autocompletion=complete, rich_help_panel=panel)


def lists(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Return the completion of an option that takes some of these values, separated by commas."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{value}" for value in known if value.startswith(last)]

    return complete


def states(incomplete: str) -> list[str]:
    """Return the completion of a state: the states in a folder and in the folders below it, and these folders."""
    found = [path for pattern in ("*", "*/*") for path in glob(glob_escape(incomplete) + pattern)]  # noqa: PTH207
    named = {path for path in found if path.endswith(STATE_SUFFIXES)}
    folders = {path.rpartition("/")[0] + "/" for path in named if path.count("/") > incomplete.count("/")}
    return sorted(named | folders)


def _format(text: str) -> Format:
    try:
        return Format(text)
    except ValueError:
        raise typer.BadParameter(f"there is no format {text!r}; {use_one_of(text, Format)}") from None


def _install(shell: Shell | None) -> None:
    if shell is not None:
        from typer.completion import install  # type: ignore[attr-defined]

        _, path = install(shell=shell.value, prog_name="protokv", complete_var=_COMPLETE)
        typer.echo(f"completion for {shell} is in {path}; it takes effect in a new terminal", err=True)
        raise typer.Exit


def _show(shell: Shell | None) -> None:
    if shell is not None:
        from typer.completion import get_completion_script  # type: ignore[attr-defined]

        typer.echo(get_completion_script(prog_name="protokv", complete_var=_COMPLETE, shell=shell.value))
        raise typer.Exit


InstallCompletion = Annotated[
    Shell | None,
    typer.Option(
        "--install-completion",
        metavar="SHELL",
        is_eager=True,
        callback=_install,
        help="Install completion for bash, zsh, fish or powershell.",
    ),
]
ShowCompletion = Annotated[
    Shell | None,
    typer.Option(
        "--show-completion",
        metavar="SHELL",
        is_eager=True,
        callback=_show,
        help="Print the completion script of this shell.",
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        help="A hub name, a local folder, or protokv/mini (embedded; protokv/mini-order and -words read more).",
        rich_help_panel=Panel.MOST,
    ),
]
Revision = Annotated[
    str | None,
    typer.Option(
        "--revision",
        metavar="REVISION",
        help="Branch, tag or commit of a hub model. Default: that of the state, or the main branch.",
        rich_help_panel=Panel.MODEL,
    ),
]
Device = Annotated[
    str, choice("--device", ("auto", "cpu", "cuda", "mps"), "auto, cpu, cuda, cuda:N or mps.", panel=Panel.MOST)
]
Dtype = Annotated[
    str | None,
    choice(
        "--dtype",
        ("auto", "float32", "bfloat16", "float16"),
        "auto, float32, bfloat16 or float16.",
        panel=Panel.MODEL,
    ),
]
DeviceMap = Annotated[
    str | None,
    choice(
        "--device-map",
        ("auto", "balanced"),
        "auto or balanced: spread a model over several devices, and its state with its layers.",
        panel=Panel.MODEL,
    ),
]
Quantization = Annotated[
    str | None,
    choice("--quantization", ("4bit", "8bit"), "Weights in 4bit or 8bit.", panel=Panel.MODEL, metavar="BITS"),
]
FrameTokens = Annotated[
    int | None,
    typer.Option(
        "--frame-tokens",
        metavar="COUNT",
        help="The most visual tokens of a frame; of the two frames of a step for Qwen. Default: the model's own.",
        rich_help_panel=Panel.WATCH,
    ),
]
MaxPixels = Annotated[
    int | None,
    typer.Option(
        "--max-pixels",
        metavar="COUNT",
        help="The same in pixels of a frame once it is resized, for Qwen.",
        rich_help_panel=Panel.WATCH,
    ),
]
Memory = Annotated[
    str, choice("--memory", tuple(CONFIGS), "How to remember: " + ", ".join(CONFIGS) + ".", panel=Panel.MOST)
]
Positions = Annotated[
    str | None,
    choice(
        "--positions",
        ("stream", "compact"),
        "stream, or compact: consecutive positions for what is in memory, however long the stream is.",
        panel=Panel.MEMORY,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="A constant of the memory, such as split=1:5; repeatable.",
        rich_help_panel=Panel.MEMORY,
    ),
]
Thumbnails = Annotated[
    str,
    typer.Option(
        "--thumbnails",
        metavar="COUNT|off",
        help="Small pictures to keep in the state for people to look at, 3 KiB each at most.",
        rich_help_panel=Panel.MEMORY,
    ),
]
Subtitles = Annotated[
    str,
    choice(
        "--subtitles",
        ("auto", "off"),
        "Words that enter the stream: a FILE, a language such as en, off, or auto: a file beside the video, else a "
        "text track in it.",
        panel=Panel.WATCH,
        metavar="FILE|LANG",
    ),
]
Transcribe = Annotated[
    str | None,
    typer.Option(
        "--transcribe",
        metavar="MODEL",
        help="Where there are no such subtitles, write down what is said: Whisper or Moonshine, by name or folder.",
        rich_help_panel=Panel.WATCH,
    ),
]
System = Annotated[
    str | None,
    typer.Option(
        "--system",
        metavar="TEXT",
        help="A system prompt. ingest: the model reads it before the video. query: in front of each question.",
        rich_help_panel=Panel.MODEL,
    ),
]
Trust = Annotated[
    Path | None,
    typer.Option(
        "--trust",
        metavar="KEYS",
        help="Refuse a state that no public key in this file has signed (minisign). Of ingest: with --append.",
        rich_help_panel=Panel.MODEL,
    ),
]
OutputFormat = Annotated[
    Format,
    typer.Option(
        "--format",
        "-f",
        metavar="FORMAT",
        parser=_format,
        autocompletion=lists(Format),
        help="table, json (one object a line), plain, or auto: table on a terminal, json in a pipe.",
        rich_help_panel=Panel.OUTPUT,
    ),
]
Json = Annotated[bool, typer.Option("--json", hidden=True, help="The same as --format json.")]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Nothing on stderr but errors.", rich_help_panel=Panel.OUTPUT)
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.", rich_help_panel=Panel.OUTPUT)]
Timings = Annotated[
    bool,
    typer.Option(
        "--timings", help="Show where the time went: on stderr, or as a JSON key.", rich_help_panel=Panel.SPEED
    ),
]
Seed = Annotated[
    int, typer.Option("--seed", metavar="NUMBER", help="Seed of all random draws.", rich_help_panel=Panel.MEMORY)
]
