"""The tables of `protokv inspect` on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from protokv_cli.tables import bytes_text, grid, pairs, time_text

if TYPE_CHECKING:
    from rich.console import RenderableType


_COUNTERS = ("opened", "absorbed", "merged", "expired", "recycled")


def tables(d: dict[str, Any]) -> Iterator[RenderableType]:
    """Those of a document, whichever of the three it is: of one state, of two, or of one written again."""
    if "equal" in d:
        yield from _of_difference(d)
    elif "output" in d:
        yield pairs({"state": d["state"], "output": d["output"], "bytes": bytes_text(d["bytes"])}, title="written")
    else:
        yield from _of_state(d)
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


def _of_state(d: dict[str, Any]) -> Iterator[RenderableType]:
    """Stream, memory, bytes and, where the memory has them, bank and codebooks of every layer."""
    stream, memory, parts = d["stream"], d["memory"], d["bytes"]
    ended = "" if d["complete"] else ", not to its end"
    by = stream["decoders"]
    # Who really decoded: the one that was asked for may have left frames to another.
    decoders = ", ".join(f"{name}: {n} frames" for name, n in by.items()) if len(by) > 1 else "".join(by)
    decoders = decoders or stream["decoder"]
    damage = {"damaged": stream["damage"]} if stream["damage"] else {}
    commits = stream["commits_s"]
    kept = {"commits": ", ".join(time_text(one) for one in commits)} if len(commits) > 1 else {}
    yield pairs(
        {
            "source": f"{stream['source']} ({decoders})" if stream["source"] else "frames from a program",
            "watched": f"{time_text(stream['duration_s'])}{ended}",
            **kept,
            **damage,
            "steps": f"{stream['steps']} at {stream['fps']:g} frames/s",
            "tokens": f"{stream['tokens_seen']} seen, at most {stream['tokens_kept']} kept: "
            f"compression {stream['compression']:.1f}x",
            "model": f"{d['backbone']['name']} ({d['backbone']['family']}, {d['backbone']['dtype']})",
            "frames": ", ".join(f"{k} {v}".replace("_", " ") for k, v in d["backbone"]["settings"].items()) or "-",
            "format": f"version {d['format_version']}, written by {d['created_by']}",
        },
        title="stream",
    )
    shape = {
        "memory": ", ".join([memory["kind"], *(f"{name} = {value}" for name, value in memory["changes"].items())]),
        "budget": f"{memory['budget']} tokens",
        "positions": f"{memory['positions']}",
        "near": f"W = {memory['near_tokens']} exact tokens",
    }
    if memory["prototypes"]:
        K, S = memory["prototypes"], memory["pseudo_tokens"]
        shape["far"] = f"K = {K} prototypes a layer and head, S = {S} pseudo-tokens each"
        shape["residuals"] = "kept" if memory["config"]["residual"] else "off, so there are no codebooks"
    yield pairs(shape, title="memory")
    yield pairs({name: bytes_text(n) for name, n in parts.items()}, title="bytes")
    if not d["layers"]:
        return
    rows = list(enumerate(d["layers"]))
    yield grid(
        ["layer", "slots in use", "mass", "age in steps"],
        (
            (
                i,
                f"{row['slots_in_use']} / {row['slots']}",
                _span(row["mass_quantiles"]),
                _span(row["age_quantiles_steps"]),
            )
            for i, row in rows
        ),
        title="bank, all heads of a layer (least / median / greatest)",
    )
    yield grid(
        ["layer", *_COUNTERS],
        ((i, *(row[name] for name in _COUNTERS)) for i, row in rows),
        title="tokens and slots so far",
    )
    if "codebooks" in d["layers"][0]:
        yield grid(
            ["layer", "codebooks", "residuals", "key bits", "value bits"],
            (
                (
                    i,
                    _fitting(row),
                    row["residual_updates"],
                    _or_dash(row["key_usage_entropy_bits"]),
                    _or_dash(row["value_usage_entropy_bits"]),
                )
                for i, row in rows
            ),
            title="codebooks (residuals counted, entropy of the codes in use)",
        )


def _span(quantiles: list[float]) -> str:
    """Least, median and greatest of five quantiles."""
    if not quantiles:
        return "-"
    return " / ".join(f"{quantiles[i]:g}" for i in (0, len(quantiles) // 2, -1))


def _fitting(row: dict[str, Any]) -> str:
    if row["codebooks"] == "fitted":
        return "fitted"
    return f"warming up, {row['warmup_residuals']} of {row['warmup_target']}"


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
