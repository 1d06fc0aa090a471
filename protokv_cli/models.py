"""`protokv models`: published models of the supported families, what they take, and which are here and fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any

from protokv_cli import options
from protokv_cli.output import Format, Output
from protokv_cli.tables import grid

if TYPE_CHECKING:
    from rich.console import RenderableType

# Less than this share of the files is an interrupted download.
WHOLE = 0.95


def models(
    fmt: options.OutputFormat = Format.AUTO,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """List models of the supported families, what each takes, and which are here and fit this machine.

    Any model of these families can be named, also one that is not listed. A machine without network takes a copy: run
    hf download OWNER/NAME --local-dir FOLDER on another one, copy the folder, and name it: --model FOLDER.

    \b
    Examples:
      protokv models
      protokv models --format json
    """
    out = Output(fmt, as_json=as_json, quiet=False, debug=debug)
    with out.errors():
        from protokv.state.models import describe_models

        out.show(describe_models(), lambda row: [row["name"]], _tables)


def _tables(rows: Iterable[Mapping[str, Any]]) -> Iterator[RenderableType]:
    cells: list[tuple[str, ...]] = []
    for family, of_family in groupby(rows, key=lambda row: row["family"]):
        found = list(of_family)
        cells.append((f"{family}: {found[0]['name'].partition('/')[0]}/", *[""] * 7))
        cells += map(_cells, found)
    yield grid(("family: OWNER/, NAME", "disk", "f32", "bf16", "8bit", "4bit", "step", "6k"), cells)
    yield "GiB: files, memory by dtype, state at a budget of 6k. *: fits the free memory"
    yield "step: most visual tokens without --frame-tokens. here: nothing to download"
    yield "No network: hf download OWNER/NAME --local-dir DIR, copy it, --model DIR"


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    here = row["cached_bytes"] >= WHOLE * row["download_bytes"]
    memory = (f"{_gib(n)}{'*' if row['fits'][dtype] else ' '}" for dtype, n in row["memory_bytes"].items())
    files = "here" if here else _gib(row["download_bytes"])
    name = row["name"].partition("/")[2]
    return name, files, *memory, str(row["visual_tokens"]), f"{row['state_bytes'] / 2**30:.2f}"


def _gib(n: int) -> str:
    size = n / 2**30
    return f"{size:.1f}" if size < 100 else f"{size:.0f}"
