"""`protokv.toml`: settings for all commands at its top, and for one command in its table. Knows no command by name."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

import typer

from protokv_cli.declared import Command, Option, options_of, variables_of
from protokv_cli.exits import Exit
from protokv_cli.printable import printable

_EXPECTED = {bool: "true or false", int: "a whole number", float: "a number"}


def read_settings(file: Path, commands: Mapping[str, Command]) -> dict[str, dict[str, Any]]:
    """Defaults of each command's parameters; empty where there is no such file.

    Args:
        file: where it would be.
        commands: of the program, by name.

    A setting is named as its option is, `device-map` or `device_map`. One at the top serves every command that has it.
    What is wrong in the file ends the program with the code for usage.
    """
    if not file.is_file():
        return {}
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        _refuse(f"{file} cannot be read: {error}", "mend it or move it away")
    options = {name: {_key(one.name): one for one in options_of(command)} for name, command in commands.items()}
    known = {key for own in options.values() for key in own}
    defaults: dict[str, dict[str, Any]] = {name: {} for name in commands}
    for name, value in found.items():
        if name in commands and not isinstance(value, dict):
            _refuse(
                f"{file}: {name} is a command, so it has a table of settings", f"write [{name}], and settings below it"
            )
        if isinstance(value, dict):
            if name not in commands:
                _refuse(f"{file}: there is no command {name}", _nearest(name, commands))
            continue
        if _key(name) not in known:
            _refuse(f"{file}: no command has the setting {name}", _nearest(name, known))
        for command, own in options.items():
            if _key(name) in own:
                option = own[_key(name)]
                defaults[command][option.parameter] = _checked(file, name, option, value)
    for command, own in options.items():
        for name, value in found.get(command, {}).items():
            if _key(name) not in own:
                _refuse(f"{file}: {command} has no setting {name}", _nearest(name, own))
            option = own[_key(name)]
            defaults[command][option.parameter] = _checked(file, f"{command}.{name}", option, value)
    return defaults


def unknown_variables(environment: Iterable[str], commands: Mapping[str, Command]) -> list[str]:
    """A sentence for every variable that begins as ours do and is none."""
    known = {name for command in commands.values() for name in variables_of(command)}
    return [
        f"{name} is no setting; {_nearest(name, known)}"
        for name in sorted(environment)
        if name.startswith("PROTOKV_") and name not in known
    ]


def _checked(file: Path, name: str, option: Option, value: object) -> object:
    """The value of a setting if it is of the type of its option; a number will do for a text."""
    if option.several:
        values = value if isinstance(value, list) else [value]
        return [_of_type(file, name, option.kind, one) for one in values]
    return _of_type(file, name, option.kind, value)


def _of_type(file: Path, name: str, kind: type, value: object) -> object:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind in (bool, int, float):
        fits = number and (kind is float or isinstance(value, int)) if kind is not bool else isinstance(value, bool)
        expected = _EXPECTED[kind]
    elif issubclass(kind, Enum):
        known = [str(one.value) for one in kind]
        fits, expected = value in known, "one of " + ", ".join(known)
    else:
        fits, expected = number or isinstance(value, str), "a text"
    if not fits:
        _refuse(f"{file}: {name} is {value!r}", f"expected {expected}")
    return value if kind in (bool, int, float) else str(value)


def _nearest(name: str, known: Iterable[str]) -> str:
    known = sorted(known)
    near = get_close_matches(_key(name) if name.islower() else name, known, n=1)
    return f"did you mean {near[0]}?" if near else "names are those of the options in --help"


def _key(name: str) -> str:
    return name.replace("-", "_")


def _refuse(message: str, hint: str) -> NoReturn:
    typer.echo(f"Error: {printable(message)}\nHint: {printable(hint)}", err=True)
    raise typer.Exit(Exit.USAGE)
