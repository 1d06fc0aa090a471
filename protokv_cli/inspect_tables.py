"""The tables of `protokv inspect` on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from protokv_cli.inspect_layers import inner_tables
from protokv_cli.inspect_live import live_tables
from protokv_cli.inspect_summary import summary_tables
from protokv_cli.tables import bytes_text, grid, pairs

if TYPE_CHECKING:
    from rich.console import RenderableType


def tables(d: dict[str, Any], *, layers: bool = False) -> Iterator[RenderableType]:
    """Those of a document, whichever of the three it is: of one state, of two, or of one written again.

    Args:
        d: the document.
        layers: of one state, its inner tables too.
    """
    if "equal" in d:
        yield from _of_difference(d)
    elif "output" in d:
        yield pairs({"state": d["state"], "output": d["output"], "bytes": bytes_text(d["bytes"])}, title="written")
    else:
        yield from summary_tables(d)
        yield from live_tables(d)
        if layers:
            yield from inner_tables(d)
        if "verified" in d:
            yield pairs(dict(line.split(": ", 1) for line in d["verified"]), title="verified")


def _of_difference(d: dict[str, Any]) -> Iterator[RenderableType]:
    """Fields and tensors that differ."""
    a, b = d["states"]
    verdict = f"equal in all {d['tensors_compared']} tensors and the header" if d["equal"] else "different"
    yield pairs({"a": a, "b": b, "they are": verdict}, title="states")
    if d["header"]:
        rows = ((one["field"], _cell(one["a"]), _cell(one["b"])) for one in d["header"])
        yield grid(["field", "a", "b"], rows, title="header")
    if d["tensors"]:
        yield grid(
            ["tensor", "a", "b", "differing", "at most by"],
            (
                (
                    one["name"],
                    _cell(one["a"]),
                    "same" if one["b"] == one["a"] else _cell(one["b"]),
                    "-" if one["differing"] is None else f"{one['differing']} of {one['elements']}",
                    _cell(one["max_abs_difference"]),
                )
                for one in d["tensors"]
            ),
            title=f"tensors, {len(d['tensors'])} of {d['tensors_compared']}",
        )


def _cell(value: Any) -> Any:
    return "-" if value is None else value
