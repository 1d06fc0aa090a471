"""Options that several subcommands share, declared once, and the completion of their values in a shell."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from glob import escape as glob_escape
from glob import glob
from typing import Annotated, Any

import typer

from protokv.errors import use_one_of
from protokv.memories import CONFIGS
from protokv_cli.output import Format
from protokv_cli.panels import Panel

# Those of `protokv.state.form.FORMS`, which imports torch.
STATE_SUFFIXES = (".safetensors", ".zarr", ".pt")
_COMPLETE = "_PROTOKV_COMPLETE"


class Shell(StrEnum):
    """A shell with a completion script."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"
    POWERSHELL = "powershell"


def option(declared: str, text: str, panel: Panel | None = None, *, known: Iterable[str] = (), **more: Any) -> Any:
    """Return an option.

    Args:
        declared: its names and what stands for its value, as the help shows them: `--output -o STATE`.
        text: what the help says about it.
        panel: the section of the help that shows it.
        known: values that a shell completes, also after a comma.
        more: arguments of `typer.Option`.
    """
    words = declared.split()
    names = [word for word in words if word.startswith("-")]

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{value}" for value in known if value.startswith(last)]

    metavar = "".join(words[len(names) :]) or None
    more = ({"autocompletion": complete} if known else {}) | more
    return typer.Option(*names, metavar=metavar, help=text, rich_help_panel=panel, **more)


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
    option(
        "--install-completion SHELL",
        "Install completion for bash, zsh, fish or powershell.",
        is_eager=True,
        callback=_install,
    ),
]
ShowCompletion = Annotated[
    Shell | None,
    option("--show-completion SHELL", "Print the completion script of this shell.", is_eager=True, callback=_show),
]
Model = Annotated[
    str | None,
    option(
        "--model -m MODEL",
        "A hub name, a local folder, or protokv/mini (embedded; protokv/mini-order and -words read more).",
        Panel.MOST,
    ),
]
Revision = Annotated[
    str | None,
    option(
        "--revision REVISION",
        "Branch, tag or commit of a hub model. Default: that of the state, or the main branch.",
        Panel.MODEL,
    ),
]
Device = Annotated[
    str, option("--device NAME", "auto, cpu, cuda, cuda:N or mps.", Panel.MOST, known=("auto", "cpu", "cuda", "mps"))
]
Dtype = Annotated[
    str | None,
    option(
        "--dtype NAME",
        "auto, float32, bfloat16 or float16.",
        Panel.MODEL,
        known=("auto", "float32", "bfloat16", "float16"),
    ),
]
DeviceMap = Annotated[
    str | None,
    option(
        "--device-map NAME",
        "auto or balanced: spread a model over several devices, and its state with its layers.",
        Panel.MODEL,
        known=("auto", "balanced"),
    ),
]
Quantization = Annotated[
    str | None, option("--quantization BITS", "Weights in 4bit or 8bit.", Panel.MODEL, known=("4bit", "8bit"))
]
FrameTokens = Annotated[
    int | None,
    option(
        "--frame-tokens COUNT",
        "The most visual tokens of a frame; of the two frames of a step for Qwen. Default: the model's own.",
        Panel.WATCH,
    ),
]
MaxPixels = Annotated[
    int | None, option("--max-pixels COUNT", "The same in pixels of a frame once it is resized, for Qwen.", Panel.WATCH)
]
Memory = Annotated[
    str, option("--memory NAME", "How to remember: " + ", ".join(CONFIGS) + ".", Panel.MOST, known=tuple(CONFIGS))
]
Positions = Annotated[
    str | None,
    option(
        "--positions NAME",
        "stream, or compact: consecutive positions for what is in memory, however long the stream is.",
        Panel.MEMORY,
        known=("stream", "compact"),
    ),
]
Settings = Annotated[
    list[str] | None,
    option("--set NAME=VALUE", "A constant of the memory, such as split=1:5; repeatable.", Panel.MEMORY),
]
Thumbnails = Annotated[
    str,
    option(
        "--thumbnails COUNT|off",
        "Small pictures to keep in the state for people to look at, 3 KiB each at most.",
        Panel.MEMORY,
    ),
]
Subtitles = Annotated[
    str,
    option(
        "--subtitles FILE|LANG",
        "Words that enter the stream: a FILE, a language such as en, off, or auto: a file beside the video, else a "
        "text track in it.",
        Panel.WATCH,
        known=("auto", "off"),
    ),
]
Transcribe = Annotated[
    str | None,
    option(
        "--transcribe MODEL",
        "Write NAME.srt beside a file without such subtitles, with Whisper or Moonshine, by name or folder.",
        Panel.WATCH,
    ),
]
System = Annotated[
    str | None,
    option(
        "--system TEXT",
        "A system prompt. ingest: the model reads it before the video. query: in front of each question.",
        Panel.MODEL,
    ),
]
OutputFormat = Annotated[
    Format,
    option(
        "--format -f FORMAT",
        "table, json (one object a line), plain, or auto: table on a terminal, json in a pipe.",
        Panel.OUTPUT,
        parser=_format,
        known=Format,
    ),
]
Json = Annotated[bool, option("--json", "The same as --format json.", hidden=True)]
Quiet = Annotated[bool, option("--quiet -q", "Nothing on stderr but errors.", Panel.OUTPUT)]
Debug = Annotated[bool, option("--debug", "Show tracebacks.", Panel.OUTPUT)]
Timings = Annotated[bool, option("--timings", "Show where the time went: on stderr, or as a JSON key.", Panel.SPEED)]
Seed = Annotated[int, option("--seed NUMBER", "Seed of all random draws.", Panel.MEMORY)]
