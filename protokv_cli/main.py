"""The `protokv` program: its subcommands, its version and its settings file.

Settings come from flags, then PROTOKV_* variables, then protokv.toml in the current folder, then the defaults.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import typer

from protokv.version import __version__
from protokv_cli.ingest import ingest
from protokv_cli.inspect import inspect
from protokv_cli.query import query
from protokv_cli.replay import replay
from protokv_cli.settings import read_settings

SETTINGS = "protokv.toml"

app = typer.Typer(
    name="protokv",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
for command in (ingest, query, inspect, replay):
    app.command()(command)

COMMANDS = tuple(command.callback.__name__ for command in app.registered_commands if command.callback)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"protokv {__version__}")
        raise typer.Exit


@app.callback()
def protokv(
    ctx: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", "-V", is_eager=True, callback=_version, help="Print the version and exit."),
    ] = False,
) -> None:
    """Watch a video of any length in constant memory; save the state; ask about it later.

    \b
    Examples:
      protokv ingest video.mp4
      protokv query video.safetensors "what happened first?"
      protokv inspect video.safetensors
      protokv replay --study quick

    Settings: flags, then PROTOKV_* variables, then protokv.toml ([ingest], [query], [inspect], [replay]).
    """
    commands = cast(Any, ctx.command).commands
    ctx.default_map = {**read_settings(Path(SETTINGS), commands), **(ctx.default_map or {})}


def run() -> None:
    """Entry point of the console script."""
    app()
