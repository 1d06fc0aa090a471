"""`protokv.toml`: settings for all commands at its top, and for one command in its table. Knows no command by name."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import typer

from protokv_cli.exits import Exit
from protokv_cli.printable import printable


def read_settings(file: Path, commands: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Defaults of each command's parameters; empty where there is no such file.

    Args:
        file: where it would be.
        commands: of the program, each with its `params` as click has them, or typer's own copy of click.

    A setting is named as its option is, `device-map` or `device_map`. One at the top serves every command that has it.
    What is wrong in the file ends the program with the code for usage.
    """
    if not file.is_file():
        return {}
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        _refuse(f"{file} cannot be read: {error}", "mend it or move it away")
    options = {name: _options(command) for name, command in commands.items()}
    known = {option for each in options.values() for option in each}
    defaults: dict[str, dict[str, Any]] = {name: {} for name in commands}
    for name, value in found.items():
        if name in commands and not isinstance(value, dict):
            _refuse(
                f"{file}: {name} is a command, so it has a table of settings", f"write [{name}], and settings below it"
            )
        if isinstance(value, dict):
            if name not in commands:
                _refuse(f"{file}: there is no command {name}", f"use one of {', '.join(commands)}")
            continue
        if _key(name) not in known:
            _refuse(f"{file}: no command has the setting {name}", "names are those of the options in --help")
        for command, own in options.items():
            if _key(name) in own:
                defaults[command] |= _default(file, name, own[_key(name)], value)
    for command, own in options.items():
        for name, value in found.get(command, {}).items():
            if _key(name) not in own:
                _refuse(f"{file}: {command} has no setting {name}", f"see protokv {command} --help")
            defaults[command] |= _default(file, f"{command}.{name}", own[_key(name)], value)
    return defaults


def _options(command: Any) -> dict[str, Any]:
    """The options of a command by their long names, as they are keys in the file."""
    return {
        _key(option.removeprefix("--")): parameter
        for parameter in command.params
        for option in parameter.opts
        if option.startswith("--") and parameter.name != "help"
    }


def _default(file: Path, name: str, parameter: Any, value: Any) -> dict[str, Any]:
    several = getattr(parameter, "multiple", False)
    values = value if several and isinstance(value, list) else [value]
    if not all(isinstance(one, str | int | float) for one in values):
        _refuse(f"{file}: {name} is {value!r}", "use text, a number, or true or false")
    return {str(parameter.name): values if several else value}


def _key(name: str) -> str:
    return name.replace("-", "_")


def _refuse(message: str, hint: str) -> NoReturn:
    typer.echo(f"Error: {printable(message)}\nHint: {printable(hint)}", err=True)
    raise typer.Exit(Exit.USAGE)
