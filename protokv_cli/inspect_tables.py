"""The tables of `protokv inspect` on a terminal: a state, its layers, a live stream, a difference, a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from protokv.texts import count_text, cut
from protokv_cli.tables import bytes_text, grid, pairs, time_text

if TYPE_CHECKING:
    from rich.console import RenderableType

# The newest gaps of a live stream; JSON has all that the state holds.
GAPS_SHOWN = 8

_COUNTERS = ("opened", "absorbed", "merged", "expired", "recycled")

# Parts whose names do not say that they are not on disk, or not in memory.
_PARTS = {
    "total": "in memory",
    "context": "context, built anew on load",
    "plan": "plan, built anew on load",
    "file": "on disk",
}


def document_tables(d: dict[str, Any], *, layers: bool = False) -> Iterator[RenderableType]:
    """Yield the tables of a document: of one state, of two that are compared, or of one written in another form."""
    if "equal" in d:
        yield from _difference_tables(d)
    elif "output" in d:
        yield pairs({"state": d["state"], "output": d["output"], "bytes": bytes_text(d["bytes"])}, title="written")
    else:
        yield from _summary_tables(d)
        yield from _live_tables(d)
        if layers:
            yield from _layer_tables(d)
        if "verified" in d:
            yield pairs(dict(line.split(": ", 1) for line in d["verified"]), title="verified")


def fleet_tables(rows: Sequence[Mapping[str, Any]], root: str) -> Iterator[RenderableType]:
    """Yield a table of the rows of `protokv.fleet.states`, and the totals; `root` ends in a slash."""
    columns = ["state", "stream", "steps", "size", "complete"]
    cells = [_fleet_cells(row, root) for row in rows]
    if any(one[-1] for one in cells):
        columns.append("what is wrong")
    yield grid(columns, (one[: len(columns)] for one in cells), left=("what is wrong",))
    whole = sum(row["complete"] and not row["damage"] for row in rows)
    seconds, size = (sum(row[name] or 0 for row in rows) for name in ("stream_time_s", "file_bytes"))
    total = f"{len(rows)}: {whole} whole, {len(rows) - whole} not"
    yield pairs({"videos": total, "watched": time_text(seconds), "states": bytes_text(size)})


def _fleet_cells(row: Mapping[str, Any], root: str) -> tuple[Any, ...]:
    known = row["steps"] is not None
    return (
        row["state"].removeprefix(root),
        time_text(row["stream_time_s"]) if known else None,
        row["steps"],
        bytes_text(row["file_bytes"]) if known else None,
        "yes" if row["complete"] else "no",
        row["failure"] or row["damage"] or "",
    )


def _summary_tables(d: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Yield what the state has watched, what is kept and whether it is whole; the sources if there are several."""
    stream, memory = d["stream"], d["memory"]
    sources, commits = stream["sources"], stream["commits_s"]
    rows: dict[str, Any] = {"watched": _watched(d), "whole": _whole(d)}
    if d["written"]:
        rows["written"] = d["written"].replace("T", " ")[:19]
    changes = [f"{name} = {value}" for name, value in memory["changes"].items() if name != "budget"]
    rows |= {
        "kept": _kept(d),
        "size": f"{bytes_text(d['bytes']['file'])} on disk, {bytes_text(d['bytes']['total'])} in memory",
        "memory": ", ".join([f"{memory['kind']}, budget {count_text(memory['budget'], 'token')}", *changes]),
        "model": f"{d['backbone']['name']} ({d['backbone']['family']}, {d['backbone']['dtype']})",
    }
    if len(commits) > 1:
        rows["commits"] = f"{', '.join(map(time_text, commits))}; query --at TIME asks them"
    yield pairs(rows)
    if len(sources) > 1:
        cells = (
            (
                one["name"] or "frames from a program",
                time_text(one["start_s"]),
                time_text(one["end_s"]),
                _decoder(one),
                one["damage"]["message"] if one["damage"] else None,
            )
            for one in sources
        )
        yield grid(["source", "from", "to", "decoder", "damage"], cells, title=f"{len(sources)} sources")


def _watched(d: Mapping[str, Any]) -> str:
    stream = d["stream"]
    sources = stream["sources"]
    name = f"{len(sources)} sources" if len(sources) > 1 else sources[0]["name"] or "frames from a program"
    ended = "to its end" if d["complete"] else "not to its end"
    by = f" ({_decoder(sources[0])})" if len(sources) == 1 and _decoder(sources[0]) != "-" else ""
    return f"{name}{by}, {time_text(stream['watched_s'])}, {ended}"


def _decoder(source: Mapping[str, Any]) -> str:
    """Return who decoded: the decoder that was asked for may have left frames to another."""
    by = source["decoders"]
    many = ", ".join(f"{name}: {count_text(n, 'frame')}" for name, n in by.items()) if len(by) > 1 else "".join(by)
    return many or source["decoder"] or "-"


def _whole(d: Mapping[str, Any]) -> str:
    damage = "; ".join(_damage(one) for one in d["stream"]["sources"] if one["damage"])
    if "verified" in d:
        state = "all that must hold in a state was checked"
    else:
        state = "every byte is the one that was saved" if d["digests"] else "not checked"
    return f"damaged: {damage}; the state itself: {state}" if damage else f"yes: {state}"


def _damage(source: Mapping[str, Any]) -> str:
    found = source["damage"]
    counts = {"lost": found["frames_lost"], "damaged": found["frames_damaged"]}
    parts = [f"{count_text(n, 'frame')} {what}" for what, n in counts.items() if n]
    from_s = found["lost_from_s"]
    where = "" if from_s is None else f" from {time_text(source['start_s'] + from_s)}"
    return f"{found['message']} ({', '.join(parts)}{where})"


def _kept(d: Mapping[str, Any]) -> str:
    """Return how much of the stream is kept exactly, since when, and what became of the rest."""
    stream, memory = d["stream"], d["memory"]
    seen, exact = stream["tokens_seen"], stream["tokens_exact"]
    seen_text = count_text(seen, "token")
    if exact is None:
        return f"at most {stream['tokens_kept']:,} of {seen_text}"
    if exact >= seen:
        return f"all {seen_text}, exactly"
    latest = f"{seen_text}: the last {exact:,} exactly (from {time_text(stream['exact_from_s'])})"
    older = f"{memory['prototypes']:,} prototypes"
    if "words_prototypes" in d:
        latest += f" and {d['words_tokens_in_use']:,} of words"
        older += f" and {d['words_prototypes']:,} of words"
    if memory["prototypes"]:
        return f"{latest}, older ones as {older}"
    return latest if stream["tokens_kept"] <= exact else f"{latest}, at most {stream['tokens_kept']:,} in all"


def _live_tables(d: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Yield when a live stream ran and what it missed; nothing for a file."""
    live = d["stream"]["live"]
    if live is None:
        return
    rows = {
        "began": live["began"],
        "committed": live["committed"],
        "source": "lost" if live["lost"] else "there",
        "gaps": f"{live['gaps_in_all']}, {time_text(live['lost_s'])} together",
        "frames": f"{live['frames_dropped']} dropped, {live['frames_damaged']} damaged",
    }
    yield pairs(rows, title="live")
    if live["gaps"]:
        cells = (
            (one["from"], time_text(one["from_s"]), None if one["to_s"] is None else time_text(one["to_s"]), one["why"])
            for one in live["gaps"][-GAPS_SHOWN:]
        )
        yield grid(["gap", "from", "to", "why"], cells)


def _layer_tables(d: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Yield stream, memory, bytes and, if the memory has them, bank and codebooks of every layer."""
    stream, memory = d["stream"], d["memory"]
    settings = dict(d["backbone"]["settings"])
    system = settings.pop("system", None)
    yield pairs(
        {
            **({} if system is None else {"system prompt": cut(str(system))}),
            "steps": f"{count_text(stream['steps'], 'step')} at {stream['fps']:g} frames/s",
            "tokens": f"{stream['tokens_seen']:,} seen, at most {stream['tokens_kept']:,} kept: "
            f"compression {stream['compression']:.1f}x",
            "frames": ", ".join(f"{k} {v}".replace("_", " ") for k, v in settings.items()) or "-",
            "format": f"version {d['format_version']}, written by {d['created_by']}",
        },
        title="stream",
    )
    shape = {"memory": ", ".join([memory["kind"], *_assignments(memory["changes"])])}
    if memory["resolved"]:
        shape["auto"] = ", ".join(_assignments(memory["resolved"]))
    shape["budget"] = f"{count_text(memory['budget'], 'token')} that attention reads"
    shape["positions"] = f"{memory['positions']}"
    shape["near"] = f"W = {memory['near_tokens']} exact tokens"
    if memory["prototypes"]:
        K, S = memory["prototypes"], memory["pseudo_tokens"]
        shape["far"] = f"K = {K} prototypes per layer and head, shown as {count_text(S, 'pseudo-token')} each"
        shape["residuals"] = "kept" if memory["config"]["residual"] else "off, so there are no codebooks"
    yield pairs(shape, title="memory")
    yield pairs({_PARTS.get(name, name): bytes_text(n) for name, n in d["bytes"].items()}, title="bytes")
    if kinds := d.get("layer_kinds"):
        window = d["sliding_window"]
        holds = {"full": "the memory", "sliding": f"the last {window} tokens", "linear": "a recurrent state"}
        shared = {True: ", of an earlier layer", False: ""}
        rows = ((i, row["kind"], holds[row["kind"]] + shared[row["shared"]]) for i, row in enumerate(kinds))
        yield grid(["layer", "attention", "holds"], rows, title="layers of the model", left=("attention", "holds"))
    if d["layers"]:
        step_s = stream["duration_s"] / stream["steps"] if stream["steps"] else 0.0
        served = [i for i, row in enumerate(kinds or ()) if row["kind"] == "full" and not row["shared"]]
        yield from _bank_tables(d["layers"], served or range(len(d["layers"])), memory["prototypes"], step_s)


def _assignments(values: Mapping[str, Any]) -> list[str]:
    return [f"{name} = {value}" for name, value in values.items()]


def _bank_tables(
    layers: Sequence[Mapping[str, Any]], names: Sequence[int], prototypes: int, step_s: float
) -> Iterator[RenderableType]:
    rows = list(zip(names, layers, strict=True))
    heads = layers[0]["slots"] // prototypes if prototypes else 0
    bank = (
        (
            i,
            f"{row['slots_in_use']} / {row['slots']}",
            _spread(row["mass_quantiles"]),
            _spread(row["age_quantiles_steps"], lambda steps: time_text(steps * step_s)),
        )
        for i, row in rows
    )
    yield grid(
        ["layer", "prototypes", "tokens in one", "last joined, ago"],
        bank,
        title=f"bank, {heads} heads of K = {prototypes} (least / median / greatest)",
    )
    counts = ((i, *(row[name] for name in _COUNTERS)) for i, row in rows)
    yield grid(["layer", *_COUNTERS], counts, title="tokens and slots so far")
    if "codebooks" in layers[0]:
        codebooks = (
            (
                i,
                _fitting(row),
                row["residual_updates"],
                row["key_usage_entropy_bits"],
                row["value_usage_entropy_bits"],
            )
            for i, row in rows
        )
        yield grid(
            ["layer", "codebooks", "residuals", "key bits", "value bits"],
            codebooks,
            title="codebooks (residuals counted, entropy of the codes in use)",
        )


def _spread(quantiles: list[float], text: Callable[[float], str] = "{:g}".format) -> str:
    """Return the least, the median and the greatest of five quantiles."""
    if not quantiles:
        return "-"
    return " / ".join(text(quantiles[i]) for i in (0, len(quantiles) // 2, -1))


def _fitting(row: Mapping[str, Any]) -> str:
    if row["codebooks"] == "fitted":
        return "fitted"
    return f"warming up, {row['warmup_residuals']} of {row['warmup_target']}"


def _difference_tables(d: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Yield the fields and tensors in which two states differ."""
    a, b = d["states"]
    verdict = f"equal in all {d['tensors_compared']} tensors and the header" if d["equal"] else "different"
    yield pairs({"a": a, "b": b, "they are": verdict}, title="states")
    if d["header"]:
        fields = ((one["field"], one["a"], one["b"]) for one in d["header"])
        yield grid(["field", "a", "b"], fields, title="header")
    if d["tensors"]:
        tensors = (
            (
                one["name"],
                one["a"],
                "same" if one["b"] == one["a"] else one["b"],
                None if one["differing"] is None else f"{one['differing']} of {one['elements']}",
                one["max_abs_difference"],
            )
            for one in d["tensors"]
        )
        yield grid(
            ["tensor", "a", "b", "differing", "at most by"],
            tensors,
            title=f"tensors, {len(d['tensors'])} of {d['tensors_compared']}",
        )
