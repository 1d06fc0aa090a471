"""The pages of `--help`: options in panels named by what a person wants, the most used first.

The pages are plain text, on a terminal as in a pipe.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from typer.core import TyperCommand, TyperGroup

# A command with no more options than this has one list of them.
FEW = 15
_VARIABLES = (
    "Every option can be set by a variable too, PROTOKV_MAX_NEW_TOKENS for --max-new-tokens, and by a line of "
    "protokv.toml in this folder, max-new-tokens = 8. An option wins over a variable, and a variable over the file."
)


class Panel(StrEnum):
    """The panels, in the order of the page."""

    MOST = "Most used"
    WATCH = "What to watch"
    ASK = "What to ask"
    WORLDS = "Procedural streams"
    BENCHMARKS = "Published benchmarks"
    MODEL = "Model"
    MEMORY = "Memory"
    ANSWERS = "Answers"
    EVIDENCE = "Evidence in the video"
    LIVE = "Live sources"
    MANY = "Many videos"
    SPEED = "Speed"
    OUTPUT = "Output"


class Command(TyperCommand):
    """A subcommand whose help has panels."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the parts of the usage line, without the dots that a metavar already has."""
        return [piece.replace("...]...", "]...") for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, and then the options panel by panel."""
        arguments: list[tuple[str, str]] = []
        panels: dict[str, list[tuple[str, str]]] = {panel.value: [] for panel in Panel}
        for param in self.get_params(ctx):
            # The variables of all options are told once, below. An error still names the one at fault.
            param.show_envvar = False  # type: ignore[attr-defined]
            record = param.get_help_record(ctx)
            if record is None:
                continue
            if param.param_type_name == "argument":
                arguments.append((param.metavar or record[0], record[1]))
            else:
                panels[getattr(param, "rich_help_panel", None) or Panel.OUTPUT].append(record)
        options = [record for panel in panels.values() for record in panel]
        if len(options) <= FEW:
            panels = {"Options": options}
        for title, rows in {"Arguments": arguments, **panels}.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Say once how the variables of options are named."""
        formatter.write_paragraph()
        formatter.write_text(_VARIABLES)


class Group(TyperGroup):
    """The program: `help COMMAND` is `COMMAND --help`, and the list of commands is whole at any width."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read `help`, `help ingest` as `--help`, `ingest --help`."""
        return super().parse_args(ctx, [*args[1:], "--help"] if args[:1] == ["help"] else args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write each command with the first sentence of its help; click cuts it at the width."""
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        rows = [(name, one.get_short_help_str(1000)) for name, one in commands.items() if one and not one.hidden]
        with formatter.section("Commands"):
            formatter.write_dl([*rows, ("help", "Show the help of a command: protokv help ingest.")])
