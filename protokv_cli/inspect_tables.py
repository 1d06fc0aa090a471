"""The tables of `protokv inspect` on a terminal: a state, its layers, a live stream, a difference, a folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from protokv.texts import count_text, cut
from protokv_cli.output import Row, format_bytes, format_time, grid, pairs

if TYPE_CHECKING:
    from rich.console import RenderableType

# The newest gaps of a live stream; JSON has all that the state holds.
GAPS_SHOWN = 8

# Of a table of layers, beside their number: a terminal has room for a few.
COLUMNS = 5

# Parts whose names do not say that they are not on disk, or not in memory.
_PARTS = {
    "total": "in memory",
    "context": "context, built anew on load",
    "plan": "plan, built anew on load",
    "file": "on disk",
}


def document_tables(d: Row, *, layers: bool = False) -> Iterator[RenderableType]:
    """Yield the tables of a document: of one state, of two that are compared, or of one written in another form."""
    if "equal" in d:
        yield from _difference_tables(d)
    elif "output" in d:
        yield pairs({"state": d["state"], "output": d["output"], "bytes": format_bytes(d["bytes"])}, title="written")
    else:
        yield from _summary_tables(d)
        if d["stream"]["live"] is not None:
            yield from _live_tables(d["stream"]["live"])
        if layers:
            yield from _inner_tables(d)
        if "verified" in d:
            yield pairs(dict(line.split(": ", 1) for line in d["verified"]), title="verified")


def fleet_tables(rows: Sequence[Row], root: str) -> Iterator[RenderableType]:
    """Yield a table of the rows of `protokv.fleet.states`, and the totals; `root` ends in a slash."""
    cells = [
        {**row, "state": row["state"].removeprefix(root), "what is wrong": row["failure"] or row["damage"] or ""}
        for row in rows
    ]
    wrong = ["what is wrong"] if any(one["what is wrong"] for one in cells) else []
    yield grid(["state", "stream_time_s", "steps", "file_bytes", "complete", *wrong], cells)
    whole = sum(row["complete"] and not row["damage"] for row in rows)
    seconds, size = (sum(row[name] or 0 for row in rows) for name in ("stream_time_s", "file_bytes"))
    total = f"{len(rows)}: {whole} whole, {len(rows) - whole} not"
    yield pairs({"videos": total, "watched": format_time(seconds), "states": format_bytes(size)})


def _summary_tables(d: Row) -> Iterator[RenderableType]:
    """Yield what the state has watched, what is kept and whether it is whole; the sources if there are several."""
    memory, sources, commits = d["memory"], d["stream"]["sources"], d["stream"]["commits_s"]
    rows: dict[str, Any] = {"watched": _watched(d), "whole": _whole(d)}
    if d["written"]:
        rows["written"] = d["written"].replace("T", " ")[:19]
    changes = [f"{name} = {value}" for name, value in memory["changes"].items() if name != "budget"]
    rows |= {
        "kept": _kept(d),
        "size": f"{format_bytes(d['bytes']['file'])} on disk, {format_bytes(d['bytes']['total'])} in memory",
        "memory": ", ".join([f"{memory['kind']}, budget {count_text(memory['budget'], 'token')}", *changes]),
        "model": f"{d['backbone']['name']} ({d['backbone']['family']}, {d['backbone']['dtype']})",
    }
    if len(commits) > 1:
        rows["commits"] = f"{', '.join(map(format_time, commits))}; query --at TIME asks them"
    yield pairs(rows)
    if len(sources) > 1:
        cells = (
            {**one, "source": _name(one), "decoder": _decoder(one), "damage": (one["damage"] or {}).get("message")}
            for one in sources
        )
        yield grid(["source", "start_s", "end_s", "decoder", "damage"], cells, title=f"{len(sources)} sources")


def _name(source: Row) -> str:
    return str(source["name"] or "frames from a program")


def _watched(d: Row) -> str:
    sources = d["stream"]["sources"]
    name = f"{len(sources)} sources" if len(sources) > 1 else _name(sources[0])
    by = f" ({_decoder(sources[0])})" if len(sources) == 1 and _decoder(sources[0]) != "-" else ""
    return f"{name}{by}, {format_time(d['stream']['watched_s'])}, {'' if d['complete'] else 'not '}to its end"


def _decoder(source: Row) -> str:
    """Return who decoded: the decoder that was asked for may have left frames to another."""
    by = source["decoders"]
    many = ", ".join(f"{name}: {count_text(n, 'frame')}" for name, n in by.items()) if len(by) > 1 else "".join(by)
    return many or source["decoder"] or "-"


def _whole(d: Row) -> str:
    damage = "; ".join(_damage(one) for one in d["stream"]["sources"] if one["damage"])
    state = "every byte is the one that was saved" if d["digests"] else "not checked"
    if "verified" in d:
        state = "all that must hold in a state was checked"
    return f"damaged: {damage}; the state itself: {state}" if damage else f"yes: {state}"


def _damage(source: Row) -> str:
    found = source["damage"]
    counts = {"lost": found["frames_lost"], "damaged": found["frames_damaged"]}
    parts = [f"{count_text(n, 'frame')} {what}" for what, n in counts.items() if n]
    from_s = found["lost_from_s"]
    where = "" if from_s is None else f" from {format_time(source['start_s'] + from_s)}"
    return f"{found['message']} ({', '.join(parts)}{where})"


def _kept(d: Row) -> str:
    """Return how much of the stream is kept exactly, since when, and what became of the rest."""
    stream, memory = d["stream"], d["memory"]
    seen, exact = stream["tokens_seen"], stream["tokens_exact"]
    seen_text = count_text(seen, "token")
    if exact is None:
        return f"at most {stream['tokens_kept']:,} of {seen_text}"
    if exact >= seen:
        return f"all {seen_text}, exactly"
    latest = f"{seen_text}: the last {exact:,} exactly (from {format_time(stream['exact_from_s'])})"
    older = f"{memory['prototypes']:,} prototypes"
    if "words_prototypes" in d:
        latest += f" and {d['words_tokens_in_use']:,} of words"
        older += f" and {d['words_prototypes']:,} of words"
    if memory["prototypes"]:
        return f"{latest}, older ones as {older}"
    return latest if stream["tokens_kept"] <= exact else f"{latest}, at most {stream['tokens_kept']:,} in all"


def _live_tables(live: Row) -> Iterator[RenderableType]:
    """Yield when a live stream ran and what it missed."""
    summary = {
        "began": live["began"],
        "committed": live["committed"],
        "source": "lost" if live["lost"] else "there",
        "gaps": f"{live['gaps_in_all']}, {format_time(live['lost_s'])} together",
        "frames": f"{live['frames_dropped']} dropped, {live['frames_damaged']} damaged",
    }
    yield pairs(summary, title="live")
    if live["gaps"]:
        yield grid(
            ["gap", "from_s", "to_s", "why"], [{**one, "gap": one["from"]} for one in live["gaps"][-GAPS_SHOWN:]]
        )


def _inner_tables(d: Row) -> Iterator[RenderableType]:
    """Yield the constants, the bytes of each part, and what the memory reports of every layer."""
    settings, memory = d["backbone"]["settings"], d["memory"]
    yield pairs({name: cut(str(value)) for name, value in settings.items()}, title="frames of the model")
    yield pairs({name: value for name, value in memory["config"].items() if value is not None}, title="memory")
    if memory["resolved"]:
        yield pairs(memory["resolved"], title="what auto became")
    yield pairs({_PARTS.get(name, name): format_bytes(n) for name, n in d["bytes"].items()}, title="bytes")
    for name, rows in d.items():
        if isinstance(rows, list) and rows and isinstance(rows[0], dict):
            names, cells = list(rows[0]), [{"layer": i, **row} for i, row in enumerate(rows)]
            for first in range(0, len(names), COLUMNS):
                yield grid(["layer", *names[first : first + COLUMNS]], cells, title=name.replace("_", " "))


def _difference_tables(d: Row) -> Iterator[RenderableType]:
    """Yield the fields and tensors in which two states differ."""
    a, b = d["states"]
    verdict = f"equal in all {d['tensors_compared']} tensors and the header" if d["equal"] else "different"
    yield pairs({"a": a, "b": b, "they are": verdict}, title="states")
    if d["header"]:
        cells = [{**one, "a": str(one["a"]), "b": str(one["b"])} for one in d["header"]]
        yield grid(["field", "a", "b"], cells, title="header")
    if d["tensors"]:
        title = f"tensors, {len(d['tensors'])} of {d['tensors_compared']}"
        yield grid(["name", "a", "b", "differing", "elements", "max_abs_difference"], d["tensors"], title=title)
