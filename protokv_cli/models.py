"""`protokv models`: published models of the supported families, what they take, and which are here and fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from protokv_cli.options import OutputFlags
from protokv_cli.output import grid

if TYPE_CHECKING:
    from rich.console import RenderableType


def models(*, output: OutputFlags) -> None:
    """List models of the supported families, what each takes, and which are here and fit this machine.

    Any model of these families can be named, also one that is not listed. A machine without network takes a copy: run
    hf download OWNER/NAME --local-dir FOLDER on another one, copy the folder, and name it: --model FOLDER.

    ```sh
    protokv models
    protokv models --format json
    ```
    """
    out = output.open()
    with out.errors():
        from protokv.backbones.files import measure_cached
        from protokv_cli.doctor import list_devices

        room = {one["name"]: one["free_bytes"] for one in list_devices([]) if one["free_bytes"] is not None}
        out.show(describe_models(room, measure_cached()), ["name"], _tables)


def describe_models(room: Mapping[str, int], cached: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """Yield a row per published model, for the free bytes of each device and the bytes in the cache by name."""
    from protokv.backbones.sizes import DTYPES_OF_WEIGHTS, KNOWN_MODELS

    for model in KNOWN_MODELS:
        needed = {dtype: model.needed_bytes(dtype) for dtype in DTYPES_OF_WEIGHTS}
        yield {
            "name": model.name,
            "parameters": model.millions * 1_000_000,
            "visual_tokens": model.tokens,
            "cached_bytes": cached.get(model.name, 0),
            "memory_bytes": needed,
            "fits": {dtype: [one for one, free in room.items() if size <= free] for dtype, size in needed.items()},
        }


def _tables(rows: Iterable[Mapping[str, Any]]) -> Iterator[RenderableType]:
    cells = [
        {"name": row["name"], "step": row["visual_tokens"], "here": "yes" if row["cached_bytes"] else ""}
        | {dtype: f"{n / 2**30:.0f}{'*' * bool(row['fits'][dtype]):1}" for dtype, n in row["memory_bytes"].items()}
        for row in rows
    ]
    yield grid(("name", "float32", "bfloat16", "8bit", "4bit", "step", "here"), cells)
    yield "GiB of memory by dtype; *: fits the free memory. step: most visual tokens without --frame-tokens"
    yield "No network: hf download OWNER/NAME --local-dir DIR, copy it, --model DIR"
