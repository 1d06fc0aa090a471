"""The `protokv` program: its subcommands, its version and its settings file.

Settings come from flags, then PROTOKV_* variables, then protokv.toml in the current folder, then the defaults.
"""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from typer.completion import completion_init  # type: ignore[attr-defined]

from protokv import __version__
from protokv_cli import options
from protokv_cli.doctor import doctor
from protokv_cli.ingest import ingest
from protokv_cli.inspect import inspect
from protokv_cli.models import models
from protokv_cli.options import option
from protokv_cli.panels import Command, Group
from protokv_cli.process import run_and_leave
from protokv_cli.query import query
from protokv_cli.replay import replay
from protokv_cli.serve import serve
from protokv_cli.settings import enable_variables, read_settings, unknown_variables
from protokv_cli.tables import printable

SETTINGS = "protokv.toml"
# Results depend on these packages.
DEPENDS_ON = {"torch": "torch", "transformers": "transformers", "PyAV": "av", "decord": "decord"}

app = typer.Typer(
    name="protokv",
    cls=Group,
    no_args_is_help=True,
    # typer's own option guesses the shell and cannot be told one.
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
completion_init()
COMMANDS = {
    command.__name__: enable_variables(command) for command in (ingest, query, inspect, replay, serve, models, doctor)
}
for name, command in COMMANDS.items():
    app.command(name, cls=Command)(command)


def describe_versions() -> str:
    """Return lines of a name and a version, this program first. Read from metadata; nothing is imported."""
    rows = [("protokv", __version__), ("Python", platform.python_version())]
    rows += [(name, _version_of(package)) for name, package in DEPENDS_ON.items()]
    return "\n".join(f"{name} {version}" for name, version in rows)


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(describe_versions())
        raise typer.Exit


@app.callback()
def protokv(
    ctx: typer.Context,
    version: Annotated[
        bool, option("--version -V", "Print versions and exit.", is_eager=True, callback=_show_version)
    ] = False,
    install_completion: options.InstallCompletion = None,
    show_completion: options.ShowCompletion = None,
) -> None:
    """Watch a video of any length in constant memory; save the state; ask about it later.

    \b
    Examples:
      protokv ingest video.mp4
      protokv query video.safetensors "What shape appeared first?"
      protokv inspect video.safetensors
      protokv replay --study quick

    Settings: flags, then variables (PROTOKV_MAX_NEW_TOKENS for --max-new-tokens), then protokv.toml in this folder
    (max-new-tokens = 8 for all commands, or in [ingest], [query], [inspect] or [replay]).
    """
    for sentence in unknown_variables(os.environ, COMMANDS):
        typer.echo(f"Warning: {printable(sentence)}", err=True)
    ctx.default_map = {**read_settings(Path(SETTINGS), COMMANDS), **(ctx.default_map or {})}


def run() -> None:
    """Run the console script; the process ends here."""
    run_and_leave(app)
