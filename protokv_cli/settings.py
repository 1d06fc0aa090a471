"""Settings of the commands: `protokv.toml` and PROTOKV_* variables. Knows no command by name.

A command's options are read off its function's annotations. `protokv.toml` has settings for all commands at its top,
and for one command in its table. Every option also has a variable: PROTOKV_MAX_NEW_TOKENS for --max-new-tokens.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, NoReturn, get_args, get_origin, get_type_hints

import typer
from typer.models import ArgumentInfo, OptionInfo

from protokv.errors import did_you_mean
from protokv_cli.exits import Exit
from protokv_cli.tables import printable

Command = Callable[..., None]
_EXPECTED = {bool: "true or false", int: "a whole number", float: "a number"}


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a command, such as `max-new-tokens` of the parameter `max_new_tokens`."""

    name: str
    parameter: str
    kind: type  # of one value
    repeatable: bool
    info: OptionInfo

    @property
    def variable(self) -> str:
        """The variable of the environment that sets it."""
        return "PROTOKV_" + _key(self.name).upper()


def enable_variables(command: Command) -> Command:
    """Let every option of a command be set by its variable; return the command."""
    # typer reads annotations that are text anew, so the evaluated ones take their place.
    command.__annotations__ = get_type_hints(command, include_extras=True)
    for option in _options(command):
        option.info.envvar = option.variable
    return command


def unknown_variables(environment: Iterable[str], commands: Mapping[str, Command]) -> list[str]:
    """Return a sentence for every PROTOKV_* variable that sets nothing."""
    known = {name for command in commands.values() for name in _variables(command)}
    return [
        f"{name} is no setting; {_suggest(name, known)}"
        for name in sorted(environment)
        if name.startswith("PROTOKV_") and name not in known
    ]


def read_settings(file: Path, commands: Mapping[str, Command]) -> dict[str, dict[str, Any]]:
    """Return the defaults of each command's parameters; empty if there is no file.

    A setting is named like its option, `device-map` or `device_map`. One at the top serves every command that has it.
    A mistake in the file ends the program with the code for usage.
    """
    if not file.is_file():
        return {}
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        _refuse(f"{file} cannot be read: {error}", "mend it or move it away")
    options = {name: {_key(one.name): one for one in _options(command)} for name, command in commands.items()}
    known = {key for own in options.values() for key in own}
    defaults: dict[str, dict[str, Any]] = {name: {} for name in commands}
    for name, value in found.items():
        if name in commands and not isinstance(value, dict):
            _refuse(
                f"{file}: {name} is a command, so it has a table of settings", f"write [{name}], and settings below it"
            )
        if isinstance(value, dict):
            if name not in commands:
                _refuse(f"{file}: there is no command {name}", _suggest(name, commands))
            continue
        if _key(name) not in known:
            _refuse(f"{file}: no command has the setting {name}", _suggest(name, known))
        for command, own in options.items():
            if option := own.get(_key(name)):
                defaults[command][option.parameter] = _check(file, name, option, value)
    for command, own in options.items():
        for name, value in found.get(command, {}).items():
            if _key(name) not in own:
                _refuse(f"{file}: {command} has no setting {name}", _suggest(name, own))
            option = own[_key(name)]
            defaults[command][option.parameter] = _check(file, f"{command}.{name}", option, value)
    return defaults


def _options(command: Command) -> Iterator[Option]:
    for parameter, hint in get_type_hints(command, include_extras=True).items():
        if get_origin(hint) is not Annotated:
            continue
        kind, *notes = get_args(hint)
        info = next((note for note in notes if isinstance(note, OptionInfo)), None)
        if info is None:
            continue
        # In an annotation typer keeps the first name in `default`.
        names = [name for name in (info.default, *(info.param_decls or ())) if isinstance(name, str)]
        long = next(name for name in names if name.startswith("--"))
        if isinstance(kind, UnionType):
            kind = next(one for one in get_args(kind) if one is not type(None))
        repeatable = get_origin(kind) is list
        name = long.partition("/")[0].removeprefix("--")
        yield Option(name, parameter, get_args(kind)[0] if repeatable else kind, repeatable, info)


@cache
def _variables(command: Command) -> set[str]:
    """Return all variables that a command reads: those of its options and of its arguments."""
    hints = get_type_hints(command, include_extras=True).values()
    notes = [note for hint in hints if get_origin(hint) is Annotated for note in get_args(hint)[1:]]
    named = {str(note.envvar) for note in notes if isinstance(note, ArgumentInfo) and note.envvar}
    return named | {option.variable for option in _options(command)}


def _check(file: Path, name: str, option: Option, value: object) -> object:
    """Return the value of a setting if it has the type of its option; a number will do for a text."""
    if option.repeatable:
        values = value if isinstance(value, list) else [value]
        return [_check_type(file, name, option.kind, one) for one in values]
    return _check_type(file, name, option.kind, value)


def _check_type(file: Path, name: str, kind: type, value: object) -> object:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is bool:
        fits, expected = isinstance(value, bool), _EXPECTED[kind]
    elif kind in (int, float):
        fits, expected = is_number and (kind is float or isinstance(value, int)), _EXPECTED[kind]
    elif issubclass(kind, Enum):
        known = [str(one.value) for one in kind]
        fits, expected = value in known, "one of " + ", ".join(known)
    else:
        fits, expected = is_number or isinstance(value, str), "a text"
    if not fits:
        _refuse(f"{file}: {name} is {value!r}", f"expected {expected}")
    return value if kind in (bool, int, float) else str(value)


def _suggest(name: str, known: Iterable[str]) -> str:
    return did_you_mean(_key(name), known) or "names are those of the options in --help"


def _key(name: str) -> str:
    return name.replace("-", "_")


def _refuse(message: str, hint: str) -> NoReturn:
    typer.echo(f"Error: {printable(message)}\nHint: {printable(hint)}", err=True)
    raise typer.Exit(Exit.USAGE)
