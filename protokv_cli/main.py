"""The `protokv` program: its subcommands and its version.

Settings come from flags, then PROTOKV_* variables, then the defaults.
"""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from protokv.version import __version__
from protokv_cli.doctor import doctor
from protokv_cli.ingest import ingest
from protokv_cli.inspect import inspect
from protokv_cli.mcp import mcp
from protokv_cli.models import models
from protokv_cli.options import make_typer_command
from protokv_cli.process import run_and_exit
from protokv_cli.query import query
from protokv_cli.replay import replay
from protokv_cli.serve import serve


class _HelpfulGroup(TyperGroup):
    """The program: `help COMMAND` is `COMMAND --help`, and a usage error is a line, not a box."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run it. typer draws a box around errors of a program with markup, and a script looks for
        `Error:`.
        """
        self.rich_markup_mode = None
        if os.environ.get("COLUMNS") == "0":
            # Some terminals say so; rich would draw nothing.
            del os.environ["COLUMNS"]
        return super().main(*args, **options)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help of the program."""
        self.rich_markup_mode = "markdown"
        super().format_help(ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read `help`, `help ingest` as `--help`, `ingest --help`."""
        return super().parse_args(ctx, [*args[1:], "--help"] if args[:1] == ["help"] else args)


app = typer.Typer(
    name="protokv",
    cls=_HelpfulGroup,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
COMMANDS = {
    one.__name__: make_typer_command(one)
    for one in (ingest, query, inspect, replay, serve, mcp, models, doctor)
}
for name, one in COMMANDS.items():
    app.command(name)(one)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"protokv {__version__}")
        raise typer.Exit


@app.callback()
def _run_without_command(
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", help="Print it and exit.", is_eager=True, callback=_show_version
        ),
    ] = False,
) -> None:
    """Watch a video of any length in constant memory; save the state; ask about it later.

    ```sh
    protokv ingest video.mp4
    protokv query video.safetensors "What shape appeared first?"
    protokv inspect video.safetensors
    protokv replay video.mp4 --questions questions.jsonl
    ```

    Every option has a variable, PROTOKV_MAX_NEW_TOKENS for --max-new-tokens. An option wins over
    its variable."""


def run() -> None:
    """Run the console script; the process ends here."""
    run_and_exit(app)
