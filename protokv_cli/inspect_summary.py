"""What `protokv inspect` says first: what a state has watched and how far, what is kept, and whether it is whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from protokv_cli.tables import bytes_text, count_text, grid, pairs, time_text

if TYPE_CHECKING:
    from rich.console import RenderableType


def summary_tables(d: Mapping[str, Any]) -> Iterator[RenderableType]:
    """One table of answers, and one of the sources where there are several."""
    stream, memory = d["stream"], d["memory"]
    sources, commits = stream["sources"], stream["commits_s"]
    rows: dict[str, Any] = {"watched": _watched(d), "whole": _whole(d)}
    if d["written"]:
        rows["written"] = d["written"].replace("T", " ")[:19]
    rows |= {
        "kept": _kept(d),
        "size": f"{bytes_text(d['bytes']['file'])} on disk, {bytes_text(d['bytes']['total'])} in memory",
        "memory": ", ".join(
            [
                f"{memory['kind']}, budget {count_text(memory['budget'], 'token')}",
                *(f"{name} = {value}" for name, value in memory["changes"].items() if name != "budget"),
            ]
        ),
        "model": f"{d['backbone']['name']} ({d['backbone']['family']}, {d['backbone']['dtype']})",
    }
    if len(commits) > 1:
        rows["commits"] = f"{', '.join(map(time_text, commits))}; query --at TIME asks them"
    yield pairs(rows)
    if len(sources) > 1:
        yield grid(
            ["source", "from", "to", "decoder", "damage"],
            (
                (
                    one["name"] or "frames from a program",
                    time_text(one["start_s"]),
                    time_text(one["end_s"]),
                    _decoder(one),
                    one["damage"]["message"] if one["damage"] else "-",
                )
                for one in sources
            ),
            title=f"{len(sources)} sources",
        )


def _watched(d: Mapping[str, Any]) -> str:
    stream = d["stream"]
    sources = stream["sources"]
    name = f"{len(sources)} sources" if len(sources) > 1 else sources[0]["name"] or "frames from a program"
    ended = "to its end" if d["complete"] else "not to its end"
    by = f" ({_decoder(sources[0])})" if len(sources) == 1 and _decoder(sources[0]) != "-" else ""
    return f"{name}{by}, {time_text(stream['watched_s'])}, {ended}"


def _decoder(source: Mapping[str, Any]) -> str:
    """Who really decoded: the one that was asked for may have left frames to another."""
    by = source["decoders"]
    many = ", ".join(f"{name}: {count_text(n, 'frame')}" for name, n in by.items()) if len(by) > 1 else "".join(by)
    return many or source["decoder"] or "-"


def _whole(d: Mapping[str, Any]) -> str:
    damage = [one for one in d["stream"]["sources"] if one["damage"]]
    said = "; ".join(_damage(one) for one in damage)
    if "verified" in d:
        state = "all that must hold in a state was checked"
    else:
        state = "every byte is the one that was saved" if d["digests"] else "not checked"
    return f"damaged: {said}; the state itself: {state}" if damage else f"yes: {state}"


def _damage(source: Mapping[str, Any]) -> str:
    found = source["damage"]
    counts = {"lost": found["frames_lost"], "damaged": found["frames_damaged"]}
    parts = [f"{count_text(n, 'frame')} {what}" for what, n in counts.items() if n]
    from_s = found["lost_from_s"]
    where = "" if from_s is None else f" from {time_text(source['start_s'] + from_s)}"
    return f"{found['message']} ({', '.join(parts)}{where})"


def _kept(d: Mapping[str, Any]) -> str:
    """Of what was seen: how much exactly and since when, and what became of the rest."""
    stream, memory = d["stream"], d["memory"]
    seen, exact = stream["tokens_seen"], stream["tokens_exact"]
    seen_text = count_text(seen, "token")
    if exact is None:
        return f"at most {stream['tokens_kept']:,} of {seen_text}"
    if exact >= seen:
        return f"all {seen_text}, exactly"
    latest = f"{seen_text}: the last {exact:,} exactly (from {time_text(stream['exact_from_s'])})"
    if memory["prototypes"]:
        return f"{latest}, older ones as {memory['prototypes']:,} prototypes"
    return latest if stream["tokens_kept"] <= exact else f"{latest}, at most {stream['tokens_kept']:,} in all"
