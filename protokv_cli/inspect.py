"""`protokv inspect`: what a state holds, without its model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from protokv_cli import options
from protokv_cli.output import Format, Output


def inspect(
    state: Annotated[Path, typer.Argument(metavar="STATE", help="State that ingest wrote.")],
    fmt: options.OutputFormat = Format.AUTO,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Show the stream, the memory, the bank of every layer and the codebooks of a state.

    \b
    Examples:
      protokv inspect video.safetensors
      protokv inspect video.safetensors --json | jq .bytes.total
    """
    out = Output(fmt, as_json=as_json, quiet=False, debug=debug)
    with out.errors():
        from protokv.describe import describe

        document = describe(state)
        if out.format is Format.JSON:
            out.json(document)
        elif out.format is Format.PLAIN:
            for line in _flat(document):
                out.plain(line)
        else:
            from protokv_cli.inspect_tables import tables

            for table in tables(document):
                out.console.print(table)
                out.console.print()


def _flat(value: Any, path: str = "") -> list[str]:
    """`a.b[0].c<TAB>value` lines, for grep and cut."""
    if isinstance(value, dict):
        return [line for k, v in value.items() for line in _flat(v, f"{path}.{k}" if path else k)]
    if isinstance(value, list):
        return [line for i, v in enumerate(value) for line in _flat(v, f"{path}[{i}]")]
    return [f"{path}\t{value}"]
