"""`protokv models`: published models of the supported families, what they take, and which are here
and fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer

from protokv.errors import ModelNotFound
from protokv.texts import JsonObject
from protokv_cli.options import OutputFlags
from protokv_cli.output import Row, tabulate_rows

_Name = Annotated[
    str, typer.Argument(metavar="NAME", help="Only those with this in their name, such as qwen3.")
]
# millions of weights: greater ones take more than about three hours for one of video on a CPU
_MOST_ON_CPU = 900
_NOTES = """GiB: to watch and to answer in bfloat16; *: free here. tokens: most of a step
An hour of video takes a 0.5B 3 hours on one core, and a 7B 6 minutes on an H100
protokv/...: embedded, for drawn shapes only
Qwen3.6 and Qwen3.8 have the architecture of Qwen3.5: name them like those
No network: hf download OWNER/NAME --local-dir DIR, copy it, --model DIR"""


def models(name: _Name = "", *, output: OutputFlags) -> None:
    """List models of the supported families, what each takes, which are here and fit, and one for
    this machine.

    ```sh
    protokv models
    protokv models qwen3 --format json
    ```
    """
    out = output.open()
    with out.errors():
        from protokv.backbones.files import measure_cached_models
        from protokv_cli.doctor import list_devices

        room = {
            one["name"]: one["free_bytes"]
            for one in list_devices([])
            if one["free_bytes"] is not None
        }
        found = describe_models(room, measure_cached_models())
        wanted = [row for row in found if name.lower() in row["name"].lower()]
        if not wanted:
            raise ModelNotFound(
                f"no model with {name} in its name",
                hint="protokv models lists some; name others, too",
            )
        best = [f"For this machine: --model {row['name']}" for row in found if row["recommended"]]
        cells = [_make_cells(row) for row in wanted]
        out.show(
            wanted, lambda _: [tabulate_rows(list(cells[0]), cells), *best, *_NOTES.splitlines()]
        )


def describe_models(room: Mapping[str, int], cached: Mapping[str, int]) -> list[JsonObject]:
    """Return a row per published model, for the free bytes of each device and the bytes in the
    cache by name.

    Recommended is the greatest one in bfloat16 that fits a GPU or, without one, a CPU in bearable
    time.
    """
    from protokv.backbones.sizes import EMBEDDED_MODELS, KNOWN_MODELS, WEIGHT_DTYPES

    # These are always here, in 16 bits.
    cached = {**cached, **{one.name: 2_000_000 * one.millions for one in EMBEDDED_MODELS}}
    rows: list[JsonObject] = []
    for model in (*EMBEDDED_MODELS, *KNOWN_MODELS):
        needed = {dtype: model.needed_bytes(dtype) for dtype in WEIGHT_DTYPES}
        fits = {
            dtype: [one for one, free in room.items() if size <= free]
            for dtype, size in needed.items()
        }
        row = {
            "name": model.name,
            "parameters": model.millions * 1_000_000,
            "visual_tokens": model.tokens,
            "cached_bytes": cached.get(model.name, 0),
            "needed_bytes": needed,
        }
        rows.append(row | {"fits": fits, "recommended": False})
    on_gpu = [row for row in rows if {*row["fits"]["bfloat16"]} - {"cpu"}]
    on_cpu = [
        row
        for row in rows
        if row["fits"]["bfloat16"] and row["parameters"] <= _MOST_ON_CPU * 1_000_000
    ]
    if found := on_gpu or on_cpu:
        max(found, key=lambda row: row["parameters"])["recommended"] = True
    return rows


def _make_cells(row: Row) -> Row:
    needed = row["needed_bytes"]
    fits = row["fits"]
    gib = {
        dtype: f"{needed[dtype] / 2**30:.0f}{'*' * bool(fits[dtype]):1}"
        for dtype in ("bfloat16", "4bit")
    }
    cells = {
        "name": row["name"],
        "GiB": gib["bfloat16"],
        "GiB in 4bit": gib["4bit"],
        "tokens": row["visual_tokens"],
    }
    return cells | {"here": "yes" if row["cached_bytes"] else ""}
