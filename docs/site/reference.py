"""The tables of the reference, made from the code: `TABLES` has them by name.

The site makes them when it is built. `python docs/site/reference.py --write` writes them into the
pages of `docs/reference`, for who reads these on a code host; a test holds the two together.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import chdir
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

SAMPLE = Path(__file__).parents[2] / "samples" / "short" / "video.mp4"


def list_options() -> str:
    """Return, for each command, its help, and its options by panel."""
    import typer

    from protokv_cli.main import app

    group: Any = typer.main.get_command(app)
    options = _entries((_name_of(one), "", one.help) for one in group.params)
    commands = (
        _describe_command(name, command)
        for name, command in group.commands.items()
        if not command.hidden
    )
    return "\n\n".join((*commands, "## protokv", "Without a command.", options))


def _describe_command(name: str, command: Any) -> str:
    operands = [one for one in command.params if one.param_type_name == "argument"]
    usage = " ".join(["protokv", name, *(_name_of(one) for one in operands), "[OPTIONS]"])
    parts = [f"## {name}", f"```text\n{usage}\n```", inspect.cleandoc(command.help or "")]
    if operands:
        parts.append(_entries((_name_of(one), "", one.help) for one in operands))
    panels: dict[str, list[Any]] = {}
    for one in command.params:
        if one not in operands and not one.hidden:
            panels.setdefault(one.rich_help_panel or "Options", []).append(one)
    for panel, found in panels.items():
        entries = _entries((_name_of(one), "", one.help) for one in found)
        parts += [f"### {panel} {{ #{name}-{_slug(panel)} }}", entries]
    return "\n\n".join(parts)


def _slug(text: str) -> str:
    return re.sub(r"\W+", "-", text.lower()).strip("-")


def _name_of(parameter: Any) -> str:
    """Return an argument, or an option with its short form and its value: `-o, --output STATE`."""
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name.upper())
    names = ", ".join([*sorted(parameter.opts, key=len), *parameter.secondary_opts])
    if parameter.is_flag:
        return names
    if isinstance(parameter.default, Enum):
        return f"{names} {'|'.join(str(one.value) for one in type(parameter.default))}"
    return (
        f"{names} {parameter.metavar or ('N' if isinstance(parameter.default, int) else 'VALUE')}"
    )


def list_exit_codes() -> str:
    """Return a table of the exit codes."""
    from protokv_cli.exits import ExitCode

    meaning = _read_comments(ExitCode)
    return _table(
        ("Code", "Name", "Meaning"),
        *((str(int(one)), f"`{one.name}`", meaning[one.name]) for one in ExitCode),
    )


def list_errors() -> str:
    """Return a table of the errors of the library, each with the exit code that it becomes."""
    from protokv import errors
    from protokv_cli.exits import find_exit_code

    kinds = [
        one
        for one in vars(errors).values()
        if isinstance(one, type) and issubclass(one, errors.ProtoKVError)
    ]
    rows = (
        (f"`{one.__name__}`", str(int(find_exit_code(one("")))), inspect.getdoc(one))
        for one in kinds
    )
    return _table(("Error", "Exit code", "Meaning"), *rows)


def list_settings() -> str:
    """Return the settings that memories share, and for each memory its own settings and other
    defaults.
    """
    from protokv.memories import MEMORIES, MemoryConfig, PrototypeConfig

    parts = ["## All memories", _settings_of(MemoryConfig, frozenset())]
    with_bank = [name for name, config in MEMORIES.items() if issubclass(config, PrototypeConfig)]
    parts += [
        "## Memories with prototypes",
        f"These are {', '.join(f'`{name}`' for name in with_bank)}.",
    ]
    parts += [_settings_of(PrototypeConfig, _fields_of(MemoryConfig))]
    for name, config in MEMORIES.items():
        base = config.__mro__[1]
        parts += [f"## {name}", _text_before_sections(config)]
        if base in MEMORIES.values():
            parts.append(f"It has all settings of [`{base.name}`](#{base.name}).")
        defaults = {one.name: one.default for one in dataclasses.fields(base)}
        changed = {
            one.name: one.default
            for one in dataclasses.fields(config)
            if one.default != defaults.get(one.name, one.default)
        }
        if changed:
            parts.append(
                "Other defaults: "
                + ", ".join(f"`{key}={_value(new)}`" for key, new in changed.items())
                + "."
            )
        described = {MemoryConfig, PrototypeConfig, *MEMORIES.values()} - {config}
        known = next(one for one in config.__mro__ if one in described)
        parts.append(_settings_of(config, _fields_of(known)))
    return "\n\n".join(part for part in parts if part)


def _fields_of(config: Any) -> frozenset[str]:
    return frozenset(one.name for one in dataclasses.fields(config))


def _settings_of(config: Any, without: frozenset[str]) -> str:
    from protokv.core.settings import read_field_types

    texts: dict[str, str] = {}
    for base in reversed(config.__mro__):
        texts |= read_attributes(base)
    entries = []
    for one in dataclasses.fields(config):
        if one.name not in without:
            kind, span = read_field_types(config)[one.name]
            values = _values(kind)
            if span:
                values += " from {} to {}".format(*(f"{end:,}".removesuffix(".0") for end in span))
            entries.append(
                (one.name, f"{values}; default `{_value(one.default)}`", texts[one.name])
            )
    return _entries(entries)


def _value(default: object) -> str:
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    return str(default).lower() if isinstance(default, bool) else str(default)


def _values(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return ", ".join(f"`{one}`" for one in get_args(hint))
    words = {bool: "true or false", int: "whole number", float: "number", str: "text"}
    return words.get(hint, "two whole numbers")


def list_tensors() -> str:
    """Return, for each memory, the tensors of its state."""
    import torch

    from protokv.core.tensors import MemoryShape
    from protokv.memories import MEMORIES, DurableConfig
    from protokv.state.thumbnails import Thumbnails

    shape = MemoryShape(2, 2, 8, 3, 4, torch.bfloat16, torch.device("cpu"))
    parts = []
    declared: dict[str, Any] = {}
    for name, config in MEMORIES.items():
        # The default memory holds its centres in 8 bits or in 32; its state has the tensors of one
        # of the two.
        forms = (
            [DurableConfig(center_bits=8), DurableConfig(center_bits=32)]
            if name == "durable"
            else [config()]
        )
        declared[name] = [
            spec for form in forms for spec in MEMORIES[name].memory.declare(form, shape)
        ]
    declared["Thumbnails, of any memory"] = Thumbnails.declare()
    for name, specs in declared.items():
        entries = [
            (
                spec.name,
                ("model" if spec.dtype == shape.dtype else str(spec.dtype).removeprefix("torch."))
                + f"[{', '.join(spec.dims)}]",
                f"{spec.meaning} ({spec.unit})"
                if spec.unit and spec.unit not in spec.meaning
                else spec.meaning,
            )
            for spec in sorted(
                {spec.name: spec for spec in specs}.values(), key=lambda spec: spec.name
            )
        ]
        parts += [f"## {name}", _entries(entries)]
    return "\n\n".join(parts)


def list_events() -> str:
    """Return the keys of each event of `ingest`."""
    from protokv.ingestion import events
    from protokv.ingestion.estimate import IngestEstimate
    from protokv_cli.ingest_report import name_event

    kinds = [(name_event(object.__new__(one)), one) for one in get_args(events.IngestEvent)]
    return "\n\n".join(
        _keys_of(name, kind) for name, kind in [*kinds, ("estimate", IngestEstimate)]
    )


def list_fleet_rows() -> str:
    """Return the keys of each kind of row of a fleet."""
    from protokv.fleet import VideoFailure, VideoOutcome

    return "\n\n".join(
        _keys_of(name, kind)
        for name, kind in (("video and plan", VideoOutcome), ("failure", VideoFailure))
    )


def list_replay_keys() -> str:
    """Return the keys of a row of `replay`."""
    from protokv.replay.rows import AnswerRow

    return _keys_of("row", AnswerRow)


def _keys_of(name: str, record: type) -> str:
    texts: dict[str, str] = {}
    for base in reversed(record.__mro__):
        texts |= read_attributes(base) | _read_comments(base)
    # The keys of a job stand in its row.
    found = [one for one in dataclasses.fields(record) if one.name != "job"]
    entries = _entries(
        (one.name, _kind(str(one.type)), texts.get(one.name) or _spell_out(one.name))
        for one in found
    )
    return f"### {name}\n\n{_text_before_sections(record)}\n\n{entries}"


def _read_comments(record: type) -> dict[str, str]:
    """Return the comment of each field of a class: behind it, or in the lines above it."""
    if record is object:
        return {}
    source = inspect.getsource(record)
    found = re.findall(r"^    (\w+)(?:: | = )[^#\n]*# (.*)$", source, re.MULTILINE)
    above = re.findall(r"((?:^    # .*\n)+)    (\w+)(?:: | = )[^#\n]*$", source, re.MULTILINE)
    found += [
        (name, " ".join(text.replace("    # ", "").split("\n")).strip()) for text, name in above
    ]
    return {name: text[:1].upper() + text[1:] for name, text in found}


def _spell_out(name: str) -> str:
    """Return what a name says by itself, with its unit: `stream_time_s` is the stream time in
    seconds.
    """
    units = {"s": "in seconds", "bytes": "in bytes"}
    *words, last = name.split("_")
    return (
        f"The {' '.join([*words, units[last]])}"
        if words and last in units
        else f"The {' '.join([*words, last])}"
    )


JSON_TYPES = {
    "str": "text",
    "int": "number",
    "float": "number",
    "bool": "true or false",
    "None": "null",
    "list[str]": "list of texts",
    "tuple[str, ...]": "list of texts",
    "JsonObject": "object",
    "dict[str, float]": "object",
    "list[EvidenceSpan]": "list of objects",
    "VideoFailure": "object",
}


def _kind(annotation: str) -> str:
    """Return an annotation in the words of JSON. All others are names of texts, whose values the
    meaning lists.
    """
    return " or ".join(JSON_TYPES.get(part, "text") for part in annotation.split(" | "))


def show_runs() -> str:
    """Return what commands about a short video really print, as JSON with one key a line."""
    from typer.testing import CliRunner

    from protokv_cli.main import app

    parts = []
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        Path("video.mp4").symlink_to(SAMPLE)
        for command in (
            ["ingest", "video.mp4", "--json"],
            ["query", "video.safetensors", "What shape appeared first?", "--evidence", "--json"],
            ["inspect", "video.safetensors", "--json"],
        ):
            done = CliRunner().invoke(
                app, command, env={"PROTOKV_MODEL": "protokv/mini", "NO_COLOR": "1"}
            )
            if done.exit_code:
                raise RuntimeError(
                    f"protokv {' '.join(command)} ended with {done.exit_code}: {done.stderr}"
                )
            line = json.dumps(
                json.loads(done.stdout.splitlines()[-1]), indent=2, ensure_ascii=False
            )
            shown = " ".join(f'"{part}"' if " " in part else part for part in command)
            parts.append(f"The last line of `protokv {shown}`:\n\n```json\n{line}\n```")
    return "\n\n".join(parts)


def read_attributes(documented: type) -> dict[str, str]:
    """Return the text of each name in the section `Attributes:` of a docstring."""
    _, _, section = inspect.cleandoc(documented.__doc__ or "").partition("\nAttributes:\n")
    section = re.split(r"^\S", section, maxsplit=1, flags=re.MULTILINE)[0]
    texts = {}
    for entry in re.split(r"\n(?=    \S)", section.rstrip()):
        names, _, text = entry.strip().partition(":")
        texts |= {name.strip(): " ".join(text.split()) for name in names.split(",")}
    return texts


def _text_before_sections(documented: type) -> str:
    return re.split(r"\n(?:Attributes|Args|Raises):\n", inspect.getdoc(documented) or "")[0].strip()


def _entries(found: Iterable[tuple[str, str, str | None]]) -> str:
    """Return a list of names, each with its kind and its text. A list reads well on a phone, where
    a table does not.
    """
    return "\n\n".join(
        f"`{name}`{f' <small>{kind}</small>' if kind else ''}\n:   {_one_line(text) or 'No text.'}"
        for name, kind, text in found
    )


def _table(*rows: Iterable[str | None]) -> str:
    """Return a table; the first row is its head."""
    head, *others = ([_one_line(cell).replace("|", "&#124;") for cell in row] for row in rows)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *others))


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


TABLES: dict[str, Callable[[], str]] = {
    "options": list_options,
    "exit_codes": list_exit_codes,
    "errors": list_errors,
    "settings": list_settings,
    "tensors": list_tensors,
    "events": list_events,
    "fleet": list_fleet_rows,
    "replay": list_replay_keys,
    "runs": show_runs,
}

PART = re.compile(r"(<!-- from the code: (\w+) -->\n)(.*?)(\n<!-- to here -->)", re.DOTALL)
"""What stands in a page: what comes before, the name of the table, the table, and what ends it."""


def write() -> None:
    """Write the tables into the pages."""
    for page in (Path(__file__).parents[1] / "reference").glob("*.md"):
        text = page.read_text(encoding="utf-8")
        page.write_text(
            PART.sub(lambda found: found[1] + TABLES[found[2]]() + found[4], text), encoding="utf-8"
        )


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    if sys.argv[1:] == ["--write"]:
        write()
    else:
        print("\n\n".join(TABLES[name]() for name in sys.argv[1:] or TABLES))  # noqa: T201
