"""The options of a command, read off its function: their names, the variables of the environment, their types."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from typer.models import ArgumentInfo, OptionInfo

Command = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a command.

    Attributes:
        name: its long name without dashes, `max-new-tokens`.
        parameter: of the function, `max_new_tokens`.
        kind: the type of a value.
        several: whether it may be given more than once.
    """

    name: str
    parameter: str
    kind: type
    several: bool

    @property
    def variable(self) -> str:
        """Of the environment."""
        return "PROTOKV_" + self.name.replace("-", "_").upper()


def options_of(command: Command) -> list[Option]:
    """All of a command, in order."""
    return [option for option, _ in _declared(command)]


def variables_of(command: Command) -> set[str]:
    """Of the environment, all that a command reads: those of its options, and what its arguments name."""
    hints = get_type_hints(command, include_extras=True).values()
    notes = [note for hint in hints if get_origin(hint) is Annotated for note in get_args(hint)[1:]]
    named = {str(note.envvar) for note in notes if isinstance(note, ArgumentInfo) and note.envvar}
    return named | {option.variable for option in options_of(command)}


def read_variables(command: Command) -> Command:
    """Let every option of a command be set by its variable; returns the command."""
    # Annotations that are text are read anew by whoever asks, so what is changed has to be put in their place.
    command.__annotations__ = get_type_hints(command, include_extras=True)
    for option, info in _declared(command):
        info.envvar = option.variable
    return command


def _declared(command: Command) -> Iterator[tuple[Option, OptionInfo]]:
    for parameter, hint in get_type_hints(command, include_extras=True).items():
        if get_origin(hint) is not Annotated:
            continue
        declared, *notes = get_args(hint)
        info = next((note for note in notes if isinstance(note, OptionInfo)), None)
        if info is None:
            continue
        # In an annotation the first name stands where a default would.
        names = [name for name in (info.default, *(info.param_decls or ())) if isinstance(name, str)]
        long = next(name for name in names if name.startswith("--"))
        kind = _without_none(declared)
        several = get_origin(kind) is list
        name = long.partition("/")[0].removeprefix("--")
        yield Option(name, parameter, get_args(kind)[0] if several else kind, several), info


def _without_none(kind: Any) -> Any:
    if isinstance(kind, UnionType):
        return next(one for one in get_args(kind) if one is not type(None))
    return kind
