"""`protokv inspect`: show a state or a folder of them, compare two, write one in another form. Needs no model."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from protokv.errors import ConfigError
from protokv_cli import options
from protokv_cli.commits import LOOK_S, await_first_commit, note_commit, rounds, stream_time_of
from protokv_cli.exits import Exit
from protokv_cli.options import option
from protokv_cli.output import Format, Output
from protokv_cli.process import interruptible
from protokv_cli.tables import flat_lines, grid, time_text


def inspect(
    state: Annotated[
        str,
        typer.Argument(
            metavar="STATE", help="State that ingest wrote; or a folder of them.", autocompletion=options.states
        ),
    ],
    other: Annotated[
        str | None,
        typer.Argument(
            metavar="STATE2",
            help="A second state: show how they differ. Exit 0 if equal, 1 if not.",
            autocompletion=options.states,
        ),
    ] = None,
    output: Annotated[
        str | None, option("--output -o PATH", "Write the state again, in the form that the suffix names.")
    ] = None,
    verify: Annotated[
        bool | None,
        option(
            "--verify/--no-verify",
            "Check all that must hold in a state and list the checks; or do not even check its bytes.",
            show_default="check its bytes",
        ),
    ] = None,
    force: Annotated[bool, option("--force", "Let --output replace any file.")] = False,
    layers: Annotated[
        bool, option("--layers", "Add the inner tables: constants, bytes, bank and codebooks of every layer.")
    ] = False,
    words: Annotated[bool, option("--words", "Show what was said, as the state knows it, with times.")] = False,
    at: Annotated[str | None, option("--at TIME", "Show the newest kept commit not after this stream time.")] = None,
    watch: Annotated[bool, option("--watch", "Show the state again after every commit.")] = False,
    fmt: options.OutputFormat = Format.AUTO,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Show what a state has watched, how much of it is kept, how big it is and whether it is whole.

    With a second state: show how the two differ, header and tensors bit for bit; the exit code is 0 if they are equal
    and 1 if they differ. With -o: write the state in another form (.safetensors, .pt, .zarr) or place (s3://...).

    \b
    Examples:
      protokv inspect video.safetensors
      protokv inspect video.safetensors --layers
      protokv inspect video.safetensors --at 7:30
      protokv inspect talk.safetensors --words
      protokv inspect video.safetensors -f json | jq .bytes.total
      protokv inspect camera.safetensors --watch
      protokv inspect video.safetensors --verify
      protokv inspect video.safetensors -o video.zarr
      protokv inspect monday.safetensors tuesday.safetensors
      protokv inspect states/
    """
    out = Output(fmt, as_json=as_json, quiet=quiet, debug=debug)
    with out.errors():
        if at is not None and (other is not None or output is not None):
            raise ConfigError("--at shows one state", hint="leave out the second state and --output")
        if watch and (other is not None or output is not None or at is not None):
            raise ConfigError("--watch shows the last commit of one state", hint="leave the other options out")
        if sum((other is not None, output is not None, verify is True, words)) > 1:
            raise ConfigError(
                "a second state, --output, --verify and --words do not go together", hint="one after the other"
            )
        if words and (watch or layers):
            raise ConfigError("--words shows the words alone", hint="leave --watch and --layers out")
        from protokv.fleet.plan import is_place

        one_state = other is not None or output is not None or at is not None or watch or words
        if is_place(state):
            if one_state or verify:
                raise ConfigError(
                    f"{state} holds many states, and these options are for one", hint="name one of the states"
                )
            _show_folder(out, state)
            return
        from protokv.state.api import load_state, read_header
        from protokv.state.describe import compare, convert, describe

        digests = verify is not False
        if other is not None:
            found = compare(load_state(state, verify=digests), load_state(other, verify=digests))
            _show(out, {"states": [state, other], **found})
            raise typer.Exit(Exit.DONE if found["equal"] else Exit.FAILURE)
        if output is not None:
            _show(out, convert(state, output, overwrite=force, digests=digests))
            return
        if watch:
            with interruptible():
                _watch(out, state, digests=digests, layers=layers)
            return
        at_s = None if at is None else stream_time_of(at, state, read_header(state), time.time())
        if words:
            _show_words(out, state, at_s, digests=digests)
            return
        document = describe(state, at_s=at_s, digests=digests, values=verify is True)
        note_commit(out, document["stream"]["duration_s"], at_s)
        _show(out, document, layers=layers)


def _watch(out: Output, state: str, *, digests: bool, layers: bool) -> None:
    """Show a state after every commit; on a terminal in the same place."""
    from protokv.state.describe import describe

    shown: dict[str, Any] = {}
    await_first_commit(out, state)
    for _ in rounds(LOOK_S):
        document = describe(state, digests=digests)
        if document != shown:
            if out.format is Format.TABLE:
                out.clear()
            _show(out, document, layers=layers)
            shown = document


def _show(out: Output, document: dict[str, Any], *, layers: bool = False) -> None:
    from protokv_cli.inspect_tables import document_tables

    out.show([document], flat_lines, lambda _: document_tables(document, layers=layers), apart=True)


def _show_words(out: Output, path: str, at_s: float | None, *, digests: bool) -> None:
    """Show what was said, a line for each step with words."""
    from protokv.state.describe import read_words
    from protokv.words.find import named, recorded

    state, transcript = read_words(path, at_s=at_s, digests=digests)
    note_commit(out, state.clock.stream_time_s, at_s)
    record = recorded(state.source)
    if lost := record.get("lost"):
        out.warn(f"Warning: not all words are known: {lost}")
    if transcript.full:
        out.note("older lines may be gone: a state keeps the last ones, about five hours of speech")
    if not transcript.lines:
        out.note(f"nothing was said so far in {named(record)}" if record else "no words are known: there were none")
    rows = [{"start_s": line.start_s, "end_s": line.end_s, "text": line.text} for line in transcript.lines]
    cells = [(time_text(line.start_s), line.text) for line in transcript.lines]
    table = [grid(["time", "words"], cells, left=("words",))] if cells else []
    out.show(rows, lambda row: [f"{time_text(row['start_s'])}\t{row['text']}"], lambda _: table)


def _show_folder(out: Output, place: str) -> None:
    """Show a row per state, and per video that has none."""
    from protokv.fleet.states import survey
    from protokv_cli.inspect_tables import fleet_tables

    def line(row: dict[str, Any]) -> list[str]:
        return ["\t".join("" if value is None else str(value) for value in row.values())]

    out.show(survey(place), line, lambda rows: fleet_tables(list(rows), place.rstrip("/") + "/"))
