"""The `protokv` program: its subcommands, its version and its settings file.

Settings come from flags, then PROTOKV_* variables, then protokv.toml in the current folder, then the defaults.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated

import typer

from protokv.version import __version__
from protokv_cli.exits import Exit
from protokv_cli.ingest import ingest
from protokv_cli.inspect import inspect
from protokv_cli.query import query
from protokv_cli.replay import replay

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
    ctx.default_map = {**_settings(), **(ctx.default_map or {})}


def _settings() -> dict[str, dict[str, object]]:
    """Defaults a subcommand from protokv.toml; `-` and `_` are the same in its keys."""
    file = Path(SETTINGS)
    if not file.is_file():
        return {}
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        typer.echo(f"Error: {SETTINGS} cannot be read: {error}\nHint: mend it or move it away", err=True)
        raise typer.Exit(Exit.USAGE) from error
    common = {k: v for k, v in tables.items() if not isinstance(v, dict)}
    return {
        command: {k.replace("-", "_"): v for k, v in {**common, **tables.get(command, {})}.items()}
        for command in COMMANDS
    }


def run() -> None:
    """Entry point of the console script."""
    app()
