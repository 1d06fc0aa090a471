"""Completion in the shell: of option values, and the script for the shell that is asked for. Knows no command."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Annotated

import typer

COMPLETE = "_PROTOKV_COMPLETE"


class Shell(StrEnum):
    """What a script can be made for."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"
    POWERSHELL = "powershell"


def values(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Completion of an option that takes one of these."""
    return lambda incomplete: [value for value in known if value.startswith(incomplete)]


def lists(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Completion of an option that takes some of these with commas between them."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{value}" for value in known if value.startswith(last)]

    return complete


def _install(shell: Shell | None) -> None:
    if shell is not None:
        from typer.completion import install  # type: ignore[attr-defined]

        _, path = install(shell=shell.value, prog_name="protokv", complete_var=COMPLETE)
        typer.echo(f"completion for {shell} is in {path}; it takes effect in a new terminal", err=True)
        raise typer.Exit


def _show(shell: Shell | None) -> None:
    if shell is not None:
        from typer.completion import get_completion_script  # type: ignore[attr-defined]

        typer.echo(get_completion_script(prog_name="protokv", complete_var=COMPLETE, shell=shell.value))
        raise typer.Exit


Install = Annotated[
    Shell | None,
    typer.Option("--install-completion", is_eager=True, callback=_install, help="Install completion for this shell."),
]
Show = Annotated[
    Shell | None,
    typer.Option("--show-completion", is_eager=True, callback=_show, help="Print the script that completes there."),
]
