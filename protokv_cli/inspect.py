"""`protokv inspect`: show a state or a folder of them, compare two, write one in another form. Needs no model."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import typer

from protokv.errors import ConfigError
from protokv_cli.commits import find_stream_time, note_commit
from protokv_cli.exits import Exit
from protokv_cli.options import OutputFlags, option
from protokv_cli.output import Output

State = Annotated[
    str,
    typer.Argument(metavar="STATE", help="State that ingest wrote; or a folder of them."),
]
Other = Annotated[
    str | None,
    typer.Argument(metavar="STATE2", help="A second state: show how they differ. Exit 0 if equal, 1 if not."),
]


_WORDS = ("start_s", "text")


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
            from protokv_cli.inspect_tables import fleet_tables

            names = ("state", "stream_time_s", "steps", "file_bytes", "complete", "failure")
            out.show(survey(state), names, lambda rows: fleet_tables(list(rows), state.rstrip("/") + "/"))
        else:
            _show_one(out, state, other, flags)


def _show_one(out: Output, state: str, other: str | None, flags: InspectFlags) -> None:
    from protokv.state.compare import compare
    from protokv.state.describe import convert, describe
    from protokv.state.reader import Reader
    from protokv_cli.inspect_tables import document_tables

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
        out.note(
            f"nothing was said so far in {name_subtitles(record)}" if record else "no words are known: there were none"
        )
    out.show(({"start_s": one.start_s, "end_s": one.end_s, "text": one.text} for one in transcript.lines), _WORDS)
