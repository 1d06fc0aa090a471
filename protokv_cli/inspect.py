"""`protokv inspect`: show a state or a folder of them, compare two, write one in another form.
Needs no model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from protokv.texts import JsonObject, format_count, shorten_text
from protokv_cli.exits import ExitCode
from protokv_cli.options import Flags, OutputFlags, check_options, option
from protokv_cli.output import (
    Output,
    Row,
    format_bytes,
    format_time,
    tabulate_fields,
    tabulate_rows,
)
from protokv_cli.parsing import open_commit_at, show_commit_note

if TYPE_CHECKING:
    from rich.console import RenderableType

_SECOND = "A second state: show how they differ. Exit 0 if equal, 1 if not."
_State = Annotated[
    str, typer.Argument(metavar="STATE", help="State that ingest wrote; or a folder of them.")
]
_Other = Annotated[str | None, typer.Argument(metavar="STATE2", help=_SECOND)]

_ROWS_SHOWN = 8  # of the gaps of a live stream, and of the answers to standing questions


class _InspectFlags(Flags, panel="What to show"):
    """What of a state is shown."""

    target: str | None = option(
        "--output -o PATH", "Write the state again, in the form that the suffix names."
    )
    force: bool = option("--force", "Let --output replace any file.")
    model: str | None = option(
        "--model -m MODEL", "For .kv.safetensors: its model, where its own name is not found."
    )
    verify: bool = option(
        "--verify/--no-verify", "Check that every byte is as it was saved.", default=True
    )
    layers: bool = option("--layers", "Add constants, bytes, bank and codebooks of every layer.")
    words: bool = option("--words", "Show what was said, as the state knows it, with times.")
    at: str | None = option("--at TIME", "Show the newest kept commit not after this stream time.")

    def refuse_contradictions(self, state: str, other: str | None, many: bool) -> None:
        """Refuse options that do not go together. ConfigError."""
        chosen = {
            "a second state": other,
            "--output": self.target,
            "--words": self.words,
            "--layers": self.layers and self.words,
            "--at": self.at and (other or self.target),
        }
        together = [name for name, value in chosen.items() if value]
        named = f"{' and '.join(together)} do not go together"
        are_many = f"{state} holds many states, and these options are for one"
        check_options(
            (len(together) > 1, named, "one after the other"),
            (many and (together or self.at), are_many, "name one of them"),
        )


def inspect(
    state: _State, other: _Other = None, *, flags: _InspectFlags, output: OutputFlags
) -> None:
    """Show what a state has watched, how much of it is kept, how big it is and whether it is whole.

    With a second state: show how the two differ, header and tensors bit for bit; the exit code is 0
    if they are equal and 1 if they differ. With -o: write the state in another form (.safetensors,
    .pt, .zarr) or place (s3://...), or as plain tensors that other engines serve
    (.kv.safetensors).

    ```sh
    protokv inspect video.safetensors --layers
    protokv inspect talk.safetensors --words --at 7:30
    protokv inspect video.safetensors -f json | jq .bytes.total
    protokv inspect video.safetensors -o video.zarr
    protokv inspect video.safetensors -o states/video.kv.safetensors
    protokv inspect monday.safetensors tuesday.safetensors
    protokv inspect states/
    ```
    """
    out = output.open()
    with out.errors():
        from protokv.state.describe import compare_states, describe_state
        from protokv.state.folder import describe_states, names_many_states
        from protokv.state.reader import StateReader

        many = names_many_states(state)
        flags.refuse_contradictions(state, other, many)
        if many:
            out.show(
                describe_states(state),
                lambda rows: _fleet_tables(list(rows), state.rstrip("/") + "/"),
            )
        elif flags.words:
            _show_words(out, state, flags)
        elif flags.target is not None:
            out.record(_write(state, flags.target, flags), "written")
        elif other is not None:
            both = (StateReader.open(one, verify=flags.verify).state for one in (state, other))
            found = {"states": [state, other], **compare_states(*both)}
            out.show([found], lambda _: _difference_tables(found))
            if not found["equal"]:
                raise typer.Exit(ExitCode.FAILURE)
        else:
            reader = open_commit_at(out, state, flags.at, flags.verify)
            document = describe_state(state, at_s=reader.at_s, digests=flags.verify)
            show_commit_note(out, reader, document["stream"]["duration_s"])
            out.show([document], lambda _: make_inspect_tables(document, layers=flags.layers))


def _write(state: str, target: str, flags: _InspectFlags) -> JsonObject:
    """Write a state in the form that the suffix of a path names."""
    from protokv.slots import SLOTS_SUFFIX
    from protokv.state.describe import convert_state

    if target.endswith(SLOTS_SUFFIX):
        from protokv.stream.slots import export_slots

        # Only this command writes files with this suffix, so one may be replaced.
        return export_slots(state, target, default=flags.model)
    return convert_state(state, target, overwrite=flags.force, digests=flags.verify)


def _show_words(out: Output, state: str, flags: _InspectFlags) -> None:
    """Show what was said and when, a line for each step with words."""
    from protokv.state.sources import (
        describe_video_times,
        list_state_sources,
        list_video_places,
    )
    from protokv.words.find import name_subtitles, read_recorded_subtitles

    reader = open_commit_at(out, state, flags.at, flags.verify)
    lines = reader.transcript.between(0.0, math.inf)
    record = read_recorded_subtitles(reader.state.source)
    show_commit_note(out, reader, reader.state.clock.stream_time_s)
    if lost := record.get("lost"):
        out.note(f"Warning: not all words are known: {lost}")
    if reader.transcript.is_full:
        out.note(
            "older lines may be gone: a state keeps the last ones, about seven hours of speech"
        )
    if not lines:
        known = f" of {name_subtitles(record)} are known" if record else ": the video had none"
        out.note(f"no words{known}")
    places = list_video_places(list_state_sources(reader.header))
    rows = [
        {"start_s": one.start_s, "end_s": one.end_s, "text": one.text}
        | describe_video_times(places, start_s=one.start_s, end_s=one.end_s)
        for one in lines
    ]
    more = ("video", "video_start_s") if rows and "video" in rows[0] else ()
    out.show(rows, lambda rows: [tabulate_rows(("start_s", *more, "text"), rows)])


def make_inspect_tables(d: Row, *, layers: bool = False) -> Iterator[RenderableType]:
    """Yield the tables of the document of a state, with `layers` those of its parts and layers."""
    yield from _summary_tables(d)
    if layers:
        yield from _inner_tables(d)


def _fleet_tables(rows: Sequence[Row], root: str) -> Iterator[RenderableType]:
    """Yield a table of the rows of `protokv.fleet.states`, and the totals; `root` ends in a
    slash.
    """
    cells = [{**row, "state": row["state"].removeprefix(root)} for row in rows]
    yield tabulate_rows(["state", "stream_time_s", "steps", "file_bytes", "complete"], cells)
    yield from (
        f"{one['state']}: {wrong}" for one in cells if (wrong := one["failure"] or one["damage"])
    )
    whole = sum(row["complete"] and not row["damage"] for row in rows)
    seconds, size = (
        sum(row[name] or 0 for row in rows) for name in ("stream_time_s", "file_bytes")
    )
    total = f"{format_count(len(rows), 'state')}: {whole} whole, {len(rows) - whole} not"
    yield f"{total}; {format_time(seconds)} watched, {format_bytes(size)}"


def _summary_tables(d: Row) -> Iterator[RenderableType]:
    """Yield a summary of a state, its sources if it has several, the gaps of a live source, and the
    last answers.
    """
    memory = d["memory"]
    stream = d["stream"]
    model = d["backbone"]
    sources = [
        {**one, "source": one["name"] or "frames from a program"} for one in stream["sources"]
    ]
    # The decoder that was asked for may have left frames to another.
    by = " and ".join(stream["decoders"]) or stream["decoder"] or "no decoder"
    what = f"{sources[0]['source']} ({by})" if len(sources) == 1 else f"{len(sources)} sources"
    changes = [f"{name} = {value}" for name, value in memory["changes"].items() if name != "budget"]
    rows = {
        "watched": (
            f"{what}, {format_time(stream['watched_s'])}, {'' if d['complete'] else 'not '}to its "
            "end"
        ),
        "whole": _describe_damage(d),
        "written": _format_date(d["written"]),
        "kept": _describe_kept(d),
        "size": (
            f"{format_bytes(d['bytes']['file'])} on disk, {format_bytes(d['bytes']['total'])} in "
            "memory"
        ),
        "memory": ", ".join(
            [f"{memory['kind']}, budget {format_count(memory['budget'], 'token')}", *changes]
        ),
        "model": f"{model['name']} ({model['family']}, {model['dtype']})",
    }
    if len(stream["commits_s"]) > 1:
        rows["commits"] = (
            f"{', '.join(map(format_time, stream['commits_s']))}; query --at TIME asks them"
        )
    yield tabulate_fields(rows)
    if len(sources) > 1:
        cells = [{**one, "damage": (one["damage"] or {}).get("message")} for one in sources]
        yield tabulate_rows(["source", "start_s", "end_s", "decoder", "damage"], cells, title=what)
    if live := stream["live"]:
        # The newest gaps; JSON has all that the state holds.
        gaps = [{**one, "gap": _format_date(one["from"])} for one in live["gaps"][-_ROWS_SHOWN:]]
        dates = {name: _format_date(live[name]) for name in ("began", "committed")}
        lost = {"gaps": [], "lost_s": None, "lost_in_all_s": live["lost_s"]}
        yield tabulate_fields(live | dates | lost, title="live")
        if gaps:
            yield tabulate_rows(["gap", "from_s", "to_s", "why"], gaps)
    if answers := stream["answers"][-_ROWS_SHOWN:]:
        more = ["video", "video_time_s"] if "video" in answers[-1] else []
        columns = ["stream_time_s", *more, "question", "answer", "probability", "mean_logprob"]
        yield tabulate_rows(columns, answers, title="answers")


def _format_date(date: str | None) -> str:
    """Return a date of a document in local time, as `written` and a clock on the wall say it."""
    return f"{datetime.fromisoformat(date).astimezone():%Y-%m-%d %H:%M:%S}" if date else ""


def _describe_damage(d: Row) -> str:
    """Return whether every source and the state itself are whole."""
    state = "every byte is the one that was saved" if d["digests"] else "its bytes are not checked"
    damage = [one["damage"]["message"] for one in d["stream"]["sources"] if one["damage"]]
    whole = f"yes: {state}" if d["digests"] else state
    return f"damaged: {'; '.join(damage)}; the state itself: {state}" if damage else whole


def _describe_kept(d: Row) -> str:
    """Return how much of the stream is kept exactly, since when, and what became of the rest."""
    stream = d["stream"]
    memory = d["memory"]
    seen = format_count(stream["tokens_seen"], "token")
    exact = stream["tokens_exact"]
    if exact is None:
        return f"at most {stream['tokens_kept']:,} of {seen}"
    if exact >= stream["tokens_seen"]:
        return f"all {seen}, exactly"
    latest = f"{seen}: the last {exact:,} exactly (from {format_time(stream['exact_from_s'])})"
    merged = stream["tokens_seen"] - exact - d.get("words_tokens_in_use", 0)
    older = f"older ones as {min(memory['prototypes'], merged):,} prototypes"
    if "words_prototypes" in d:
        latest += f" and {d['words_tokens_in_use']:,} of words"
        older += f" and {d['words_prototypes']:,} of words"
    return (
        f"{latest}, "
        f"{older if memory['prototypes'] else 'at most {:,} in all'.format(stream['tokens_kept'])}"
    )


def _inner_tables(d: Row) -> Iterator[RenderableType]:
    """Yield the constants, the bytes of each part, and what the memory reports of every layer."""
    frames = {name: shorten_text(str(value)) for name, value in d["backbone"]["settings"].items()}
    yield tabulate_fields(frames, "frames of the model")
    yield tabulate_fields(d["memory"]["config"], "memory")
    # The context and the plan are not on disk: they are made when the state is loaded.
    sizes = {f"{name}_bytes": n for name, n in d["bytes"].items()}
    yield tabulate_fields(sizes, "bytes; total: in memory; file: on disk")
    for name, rows in d.items():
        if isinstance(rows, list) and rows and isinstance(rows[0], dict):
            cells = [{"layer": i, **row} for i, row in enumerate(rows)]
            yield tabulate_rows(list(cells[0]), cells, title=name.replace("_", " "))


def _difference_tables(d: Row) -> Iterator[RenderableType]:
    """Yield the fields and tensors in which two states differ."""
    verdict = (
        f"equal in all {d['tensors_compared']} tensors and the header"
        if d["equal"]
        else "different"
    )
    yield tabulate_fields(
        dict(zip("ab", d["states"], strict=True)) | {"they are": verdict}, title="states"
    )
    if d["header"]:
        cells = [{**one, "a": str(one["a"]), "b": str(one["b"])} for one in d["header"]]
        yield tabulate_rows(["field", "a", "b"], cells, title="header")
    if d["tensors"]:
        columns = ["name", "a", "b", "differing", "max_abs_difference"]
        yield tabulate_rows(
            columns, d["tensors"], f"tensors, {len(d['tensors'])} of {d['tensors_compared']}"
        )
