"""Options of the commands: declared once, as fields of dataclasses, and shared by the commands that
take them.

A command is a function that takes such dataclasses. `make_typer_command` turns it into one that
typer reads: each field is an option with a variable of its name, PROTOKV_MAX_NEW_TOKENS for
--max-new-tokens, and the function gets filled dataclasses. The help shows an option in the panel of
its dataclass, or in the one that its declaration names.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from enum import StrEnum
from functools import wraps
from typing import Annotated, Any, ClassVar, dataclass_transform, get_type_hints

import typer

from protokv.core.settings import MEMORY_VARIABLE, check_sampled_fps
from protokv.errors import ConfigError, did_you_mean
from protokv.memories import DEFAULT_MEMORY, MEMORIES, MemoryConfig
from protokv.texts import Keywords
from protokv_cli.output import Output
from protokv_cli.parsing import CALIBRATIONS_VARIABLE, parse_setting

TOP_PANEL = "Most used"  # the first panel of the help
SUBTITLES_HELP = (
    "Words to read: FILE, a language such as en, off, or auto: a file beside the video or a track."
)


# Every variable that is read: of options, and these.
VARIABLES = {
    "PROTOKV_SOURCE",
    "PROTOKV_ENGINE_KEY",
    MEMORY_VARIABLE,
    CALIBRATIONS_VARIABLE,
}


def note_unknown_variables(out: Output) -> None:
    """Warn of variables that look like ours and are read by nothing."""
    for name in sorted(os.environ):
        if name.startswith("PROTOKV_") and name not in VARIABLES:
            likely = did_you_mean(name, VARIABLES)
            out.note(f"Warning: no option has the variable {name}. {likely}".rstrip())


def option(
    declared: str,
    text: str,
    panel: str | None = None,
    *,
    default: Any = None,
    parse: Any = lambda it: it,
    **more: Any,
) -> Any:
    """Return a field of a dataclass that is an option.

    `declared` has its names and what stands for its value, as the help shows them: `--output -o
    STATE`. `panel` is the section of the help; None: that of its dataclass. `default` is False for
    a flag; the help shows numbers and texts. `parse` reads the text of the command line
    (`make_kwargs`), and `more` are arguments of `typer.Option`.
    """
    words = declared.split()
    if default is None and words[-1].startswith("-") and "/" not in declared:
        default = False
    names = [word for word in words if word.startswith("-")]
    long = next(name for name in names if name.startswith("--")).partition("/")[0]
    variable = "PROTOKV_" + long.removeprefix("--").replace("-", "_").upper()
    VARIABLES.add(variable)

    info = typer.Option(
        *names,
        # Without a blank, typer names the type of a flag.
        metavar="".join(words[len(names) :]) or " ",
        help=text,
        rich_help_panel=panel,
        envvar=variable,
        show_envvar=False,
        show_default=default not in (None, False, True),
        **more,
    )
    return field(default=default, metadata={"option": info, "name": long, "parse": parse})


def read_variable_lines(
    ctx: typer.Context, param: typer.CallbackParam, values: list[str] | None
) -> list[str] | None:
    """Return the values of a parameter that takes several: of its variable a line each, which typer
    cuts at blanks.
    """
    source = ctx.get_parameter_source(param.name or "")
    is_variable = source is not None and source.name == "ENVIRONMENT"
    return os.environ[str(param.envvar)].splitlines() if is_variable else values


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Flags:
    """Options of a panel of the help. A subclass is a frozen dataclass of them."""

    PANEL: ClassVar[str]

    def __init_subclass__(cls, panel: str | None = None) -> None:
        if panel is not None:
            cls.PANEL = panel
        dataclass(frozen=True, kw_only=True)(cls)


def make_typer_command(function: Callable[..., None]) -> Callable[..., None]:
    """Return a function for typer whose parameters are the fields of the dataclasses that
    `function` takes.
    """
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        group = groups.get(parameter.name)
        if group is None:
            parameters.append(parameter.replace(annotation=hints[parameter.name]))
            continue
        kinds = get_type_hints(group)
        for one in fields(group):
            info = one.metadata["option"]
            info.rich_help_panel = info.rich_help_panel or group.PANEL
            if kinds[one.name] == list[str] | None:
                info.callback = read_variable_lines
            kind: Any = Annotated[kinds[one.name], info]
            parameters.append(
                inspect.Parameter(
                    one.name, parameter.KEYWORD_ONLY, default=one.default, annotation=kind
                )
            )

    @wraps(function)
    def call(**values: Any) -> None:
        filled = {
            name: group(**{one.name: values.pop(one.name) for one in fields(group)})
            for name, group in groups.items()
        }
        function(**values, **filled)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {one.name: one.annotation for one in parameters}
    return call


def make_kwargs(flags: Any, *without: str) -> Keywords:
    """Return the options that have a value as keywords of the library, read from their texts.
    ConfigError.
    """
    kept = [
        one
        for one in fields(flags)
        if one.name not in without and getattr(flags, one.name) is not None
    ]
    return {one.name: read_option(flags, one.name) for one in kept}


def read_option(flags: Any, name: str) -> Any:
    """Return the value of an option, read from its text; None if it has none. ConfigError, naming
    the option.
    """
    (one,) = (one for one in fields(flags) if one.name == name)
    text = getattr(flags, name)
    try:
        return None if text is None else one.metadata["parse"](text)
    except ConfigError as error:
        raise ConfigError(f"{one.metadata['name']}: {error.message}", hint=error.hint) from error


def list_set_options(flags: Any, *names: str) -> list[str]:
    """Return those of some options, by their fields, that differ from their defaults."""
    found = (one for one in fields(flags) if one.name in names)
    return [one.metadata["name"] for one in found if getattr(flags, one.name) != one.default]


class OutputFormat(StrEnum):
    """The format of stdout."""

    AUTO = "auto"
    TABLE = "table"
    JSON = "json"


class DebugFlags(Flags, panel="Output"):
    """What a person who looks for a fault wants."""

    debug: bool = option("--debug", "Show tracebacks.")


class OutputFlags(DebugFlags):
    """What a command writes."""

    fmt: OutputFormat = option(
        "--format -f FORMAT", "table, json, or auto: json in a pipe.", default=OutputFormat.AUTO
    )
    as_json: bool = option("--json", "The same as --format json.")
    quiet: bool = option("--quiet -q", "Nothing on stderr but errors.")

    def open(self, *, outlives_stdout: bool = False) -> Output:
        """Return the streams of the command."""
        as_json = self.as_json or {OutputFormat.JSON: True, OutputFormat.TABLE: False}.get(self.fmt)
        out = Output(
            as_json=as_json, quiet=self.quiet, debug=self.debug, outlives_stdout=outlives_stdout
        )
        note_unknown_variables(out)
        return out


class TimedOutputFlags(OutputFlags):
    """What a command writes that also tells where its time went."""

    timings: bool = option("--timings", "Show where the time went: on stderr, or as a JSON key.")


class ModelFlags(Flags, panel="Model"):
    """Which model, and where it runs."""

    model: str | None = option(
        "--model -m MODEL",
        "A hub name, a folder, or protokv/mini (embedded).",
        TOP_PANEL,
    )
    device: str = option(
        "--device NAME",
        "auto, cpu, cuda, cuda:N or mps.",
        TOP_PANEL,
        default="auto",
    )
    revision: str | None = option(
        "--revision REVISION", "Branch, tag or commit. Default: of the state, or main."
    )
    device_map: str | None = option(
        "--device-map NAME",
        "auto or balanced: spread model and state over devices.",
    )

    @property
    def placement(self) -> Keywords:
        """Keywords of `load_backbone` that a model of a state takes, too."""
        return {"revision": self.revision, "device": self.device, "device_map": self.device_map}

    @property
    def choice(self) -> Keywords:
        """Keywords of `StateReader.session`. A state knows its model: the variable names the one
        for states whose own model is not here, an option the one for all.
        """
        is_variable = self.model == os.environ.get("PROTOKV_MODEL")
        name = {"default" if is_variable else "backbone": self.model}
        return name | self.placement

    def check(self) -> None:
        """Refuse a model or a rate that cannot be, before anything heavy is imported. ConfigError,
        ModelError.
        """
        from protokv.backbones import require_model

        if (fps := getattr(self, "fps", None)) is not None:
            check_sampled_fps(fps)
        if self.model is not None:
            require_model(self.model, self.revision)


class WatchModelFlags(ModelFlags):
    """A model that watches: its weights, and what a frame may cost."""

    fps: float | None = option(
        "--fps NUMBER", "Frames a second, at most 240. Default: the model's own.", TOP_PANEL
    )
    dtype: str | None = option(
        "--dtype NAME",
        "auto, float32, bfloat16 or float16.",
    )
    quantization: str | None = option("--quantization BITS", "Weights in 4bit or 8bit.")
    frame_tokens: int | None = option(
        "--frame-tokens COUNT", "The most visual tokens of a frame; for Qwen, of two."
    )

    @property
    def loading(self) -> Keywords:
        """Keywords of `load_backbone` and fields of `IngestOptions`; None means: as the state
        says.
        """
        more = ("dtype", "quantization", "frame_tokens")
        return self.placement | {name: getattr(self, name) for name in more}


class MemoryFlags(Flags, panel="Memory"):
    """What a state keeps."""

    memory: str | None = option(
        "--memory NAME",
        f"{', '.join(MEMORIES)}, or MODULE:CLASS. Default: of the state, or {DEFAULT_MEMORY}.",
        TOP_PANEL,
    )
    budget: str | None = option(
        "--budget -b COUNT",
        "Visual tokens to keep, such as 512. Default: of the state, or 6k.",
        TOP_PANEL,
    )
    positions: str | None = option(
        "--positions NAME",
        "stream, or compact: consecutive for what is in memory.",
    )
    settings: list[str] | None = option(
        "--set NAME=VALUE", "A constant of the memory, such as split=1:5; repeatable."
    )
    seed: int = option("--seed NUMBER", "Seed of all random draws.", default=0)
    thumbnails: int = option(
        "--thumbnails COUNT", "Pictures for people, 3 KiB each at most.", default=16, min=0
    )

    @property
    def is_chosen(self) -> bool:
        """Whether any setting of the memory is given; a state that goes on has its own."""
        names = [one.name for one in fields(self) if one.name != "thumbnails"]
        return bool(list_set_options(self, *names))

    def config(self) -> MemoryConfig:
        """Return the memory; `--set` wins over the others. ConfigError."""
        fixed = {"seed": self.seed} | (
            {} if self.positions is None else {"positions": self.positions}
        )
        base = MemoryConfig.of(self.memory or DEFAULT_MEMORY, budget=self.budget or "6k")
        return base.with_fields({**fixed, **dict(map(parse_setting, self.settings or ()))})


def check_options(*rules: tuple[object, str, str]) -> None:
    """Raise ConfigError for the first rule that is broken: whether it is, why that is no command,
    and a hint.
    """
    for broken, why, hint in rules:
        if broken:
            raise ConfigError(why, hint=hint)
