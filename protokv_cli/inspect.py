"""`protokv inspect`: show a state or a folder of them, compare two, write one in another form. Needs no model."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from protokv.errors import ConfigError
from protokv.texts import count_text, cut
from protokv_cli.commits import find_stream_time, note_commit
from protokv_cli.exits import Exit
from protokv_cli.options import OutputFlags, option
from protokv_cli.output import Output, Row, format_bytes, format_time, grid, pairs

if TYPE_CHECKING:
    from rich.console import RenderableType

State = Annotated[str, typer.Argument(metavar="STATE", help="State that ingest wrote; or a folder of them.")]
Other = Annotated[
    str | None,
    typer.Argument(metavar="STATE2", help="A second state: show how they differ. Exit 0 if equal, 1 if not."),
]

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


@dataclass(frozen=True, kw_only=True)
class InspectFlags:
    """What of a state is shown."""

    PANEL: ClassVar[str] = "What to show"
    target: str | None = option("--output -o PATH", "Write the state again, in the form that the suffix names.")
    force: bool = option("--force", "Let --output replace any file.", default=False)
    verify: bool | None = option(
        "--verify/--no-verify", "Check all that must hold, and list it; or not even its bytes. Default: its bytes."
    )
    layers: bool = option("--layers", "Add constants, bytes, bank and codebooks of every layer.", default=False)
    words: bool = option("--words", "Show what was said, as the state knows it, with times.", default=False)
    at: str | None = option("--at TIME", "Show the newest kept commit not after this stream time.")

    def refuse_contradictions(self, state: str, other: str | None, many: bool) -> None:
        """Refuse options that do not go together. ConfigError."""
        writes, verifies = other is not None or self.target is not None, self.verify is True
        if self.at is not None and writes:
            raise ConfigError("--at shows one state", hint="leave out the second state and --output")
        if sum((other is not None, self.target is not None, verifies, self.words)) > 1 or (self.words and self.layers):
            why = "a second state, --output, --verify, --layers and --words do not go together"
            raise ConfigError(why, hint="one after the other")
        if many and (writes or verifies or self.words or self.at is not None):
            why = f"{state} holds many states, and these options are for one"
            raise ConfigError(why, hint="name one of the states")


def inspect(state: State, other: Other = None, *, flags: InspectFlags, output: OutputFlags) -> None:
    """Show what a state has watched, how much of it is kept, how big it is and whether it is whole.

    With a second state: show how the two differ, header and tensors bit for bit; the exit code is 0 if they are equal
    and 1 if they differ. With -o: write the state in another form (.safetensors, .pt, .zarr) or place (s3://...).

    ```sh
    protokv inspect video.safetensors
    protokv inspect video.safetensors --layers
    protokv inspect video.safetensors --at 7:30
    protokv inspect talk.safetensors --words
    protokv inspect video.safetensors -f json | jq .bytes.total
    protokv inspect video.safetensors --verify
    protokv inspect video.safetensors -o video.zarr
    protokv inspect monday.safetensors tuesday.safetensors
    protokv inspect states/
    ```
    """
    out = output.open()
    with out.errors():
        from protokv.fleet.plan import is_place

        many = is_place(state)
        flags.refuse_contradictions(state, other, many)
        if many:
            from protokv.fleet.states import survey

            names = ("state", "stream_time_s", "steps", "file_bytes", "complete", "failure")
            out.show(survey(state), names, lambda rows: fleet_tables(list(rows), state.rstrip("/") + "/"))
        else:
            _show_one(out, state, other, flags)


def _show_one(out: Output, state: str, other: str | None, flags: InspectFlags) -> None:
    from protokv.state.describe import compare, convert, describe
    from protokv.state.reader import Reader

    def show(document: dict[str, Any]) -> None:
        out.show([document], tables=lambda rows: document_tables(document, layers=flags.layers))

    digests = flags.verify is not False
    if other is not None:
        found = compare(*(Reader.open(one, verify=digests).state for one in (state, other)))
        show({"states": [state, other], **found})
        raise typer.Exit(Exit.DONE if found["equal"] else Exit.FAILURE)
    if flags.target is not None:
        show(convert(state, flags.target, overwrite=flags.force, digests=digests))
        return
    at_s = None if flags.at is None else find_stream_time(flags.at, Reader.open(state), time.time())
    if flags.words:
        _show_words(out, Reader.open(state, at_s=at_s, verify=digests))
        return
    document = describe(state, at_s=at_s, digests=digests, values=flags.verify is True)
    note_commit(out, document["stream"]["duration_s"], at_s)
    show(document)


def _show_words(out: Output, reader: Any) -> None:
    """Show what was said, a line for each step with words."""
    from protokv.words.find import name_subtitles, recorded_subtitles

    state, transcript = reader.state, reader.transcript
    note_commit(out, state.clock.stream_time_s, reader.at_s)
    record = recorded_subtitles(state.source)
    if lost := record.get("lost"):
        out.note(f"Warning: not all words are known: {lost}")
    if transcript.is_full:
        out.note("older lines may be gone: a state keeps the last ones, about five hours of speech")
    if not transcript.lines:
        out.note(f"no words are known: {name_subtitles(record) if record else 'there were none'}")
    rows = ({"start_s": one.start_s, "end_s": one.end_s, "text": one.text} for one in transcript.lines)
    out.show(rows, ("start_s", "text"))


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
