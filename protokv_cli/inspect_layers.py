"""The inner tables of `protokv inspect --layers`: the memory's constants, its bytes, and the bank of every layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from protokv_cli.tables import bytes_text, count_text, grid, pairs, time_text

if TYPE_CHECKING:
    from rich.console import RenderableType

_COUNTERS = ("opened", "absorbed", "merged", "expired", "recycled")

# Parts whose names do not say that they are not on disk, or not in memory.
_PARTS = {
    "total": "in memory",
    "context": "context, built anew on load",
    "plan": "plan, built anew on load",
    "file": "on disk",
}


def inner_tables(d: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Stream, memory, bytes and, where the memory has them, bank and codebooks of every layer."""
    stream, memory, parts = d["stream"], d["memory"], d["bytes"]
    yield pairs(
        {
            "steps": f"{count_text(stream['steps'], 'step')} at {stream['fps']:g} frames/s",
            "tokens": f"{stream['tokens_seen']:,} seen, at most {stream['tokens_kept']:,} kept: "
            f"compression {stream['compression']:.1f}x",
            "frames": ", ".join(f"{k} {v}".replace("_", " ") for k, v in d["backbone"]["settings"].items()) or "-",
            "format": f"version {d['format_version']}, written by {d['created_by']}",
        },
        title="stream",
    )
    auto = memory["resolved"]
    shape = {
        "memory": ", ".join([memory["kind"], *(f"{name} = {value}" for name, value in memory["changes"].items())]),
        **({"auto": ", ".join(f"{name} = {value}" for name, value in auto.items())} if auto else {}),
        "budget": f"{count_text(memory['budget'], 'token')} that attention reads",
        "positions": f"{memory['positions']}",
        "near": f"W = {memory['near_tokens']} exact tokens",
    }
    if memory["prototypes"]:
        K, S = memory["prototypes"], memory["pseudo_tokens"]
        shape["far"] = f"K = {K} prototypes per layer and head, shown as {count_text(S, 'pseudo-token')} each"
        shape["residuals"] = "kept" if memory["config"]["residual"] else "off, so there are no codebooks"
    yield pairs(shape, title="memory")
    yield pairs({_PARTS.get(name, name): bytes_text(n) for name, n in parts.items()}, title="bytes")
    if not d["layers"]:
        return
    rows = list(enumerate(d["layers"]))
    heads = d["layers"][0]["slots"] // memory["prototypes"] if memory["prototypes"] else 0
    step_s = stream["duration_s"] / stream["steps"] if stream["steps"] else 0.0
    yield grid(
        ["layer", "prototypes", "tokens in one", "last joined, ago"],
        (
            (
                i,
                f"{row['slots_in_use']} / {row['slots']}",
                _span(row["mass_quantiles"]),
                _span(row["age_quantiles_steps"], lambda steps: time_text(steps * step_s)),
            )
            for i, row in rows
        ),
        title=f"bank, {heads} heads of K = {memory['prototypes']} (least / median / greatest)",
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


def _span(quantiles: list[float], shown: Callable[[float], str] = "{:g}".format) -> str:
    """Least, median and greatest of five quantiles."""
    if not quantiles:
        return "-"
    return " / ".join(shown(quantiles[i]) for i in (0, len(quantiles) // 2, -1))


def _fitting(row: dict[str, Any]) -> str:
    if row["codebooks"] == "fitted":
        return "fitted"
    return f"warming up, {row['warmup_residuals']} of {row['warmup_target']}"


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
