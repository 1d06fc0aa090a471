"""Check that a source, a memory and a model may continue a saved state, and find the source in its
stream.

A continuation ends in the bytes of one uninterrupted run. So it needs the same source, model,
memory and sampling rate, and is refused with the difference named. A finished state can be
continued with another source: times and positions go on where it ends. Sources are identified by
content and none is watched twice, so a command that appends one can be repeated, after a crash and
after its end.
"""

from __future__ import annotations

from dataclasses import replace

from protokv.core.backbone import Backbone
from protokv.errors import StateMismatch
from protokv.ingestion.live import LiveSource
from protokv.ingestion.options import IngestOptions
from protokv.state.checkpoint import check_state_fits, read_state_memory_config
from protokv.state.header import State, StateHeader
from protokv.state.sources import (
    StreamSegment,
    list_state_sources,
    make_next_segment,
    read_last_segment,
)
from protokv.state.store import StatePath
from protokv.texts import JsonRecord
from protokv.video import Source
from protokv.words.cues import Subtitles
from protokv.words.find import identify_subtitles, name_subtitles, read_recorded_subtitles


def find_continued_segment(
    path: StatePath, state: State, source: Source, *, append: bool
) -> tuple[StreamSegment, JsonRecord]:
    """Find where the source begins in the stream of a state, or stands in it already; and the
    state's record of it.

    A file is the same by its content, and a live source by its address: it goes on in the same
    state. The record is empty if nothing of the source was watched. StateMismatch: the state is of
    another source, or its last source is not watched to its end.
    """
    last = state.source or {}
    ours = source.info.fingerprint
    records = list_state_sources(state)
    if isinstance(source, LiveSource):
        if (last.get("kind"), last.get("name")) == (source.info.kind, source.info.name):
            part = replace(read_last_segment(state), done=False)
            return part, last if part.first_step < state.clock.steps else {}
    # A source without a fingerprint (frames from a program) equals no other, not even itself a
    # moment ago.
    elif ours is not None:
        for record in reversed(records if append else records[:1]):
            if record.get("fingerprint") == ours:
                # If another source was appended since, this one was watched to its end.
                is_last = last.get("fingerprint") == ours
                return read_last_segment(state) if is_last else StreamSegment(done=True), record
    if not append:
        theirs = records[0].get("name") or "frames from a program"
        raise StateMismatch(
            f"{path} is the state of another source, {theirs}, or of an earlier version of it; "
            f"this run's source is {source.info.name}",
            hint="name another state with -o, watch after it with --append, or replace it with "
            "--force",
        )
    if not state.complete and last and "live" not in last:
        # A live source has no end.
        raise StateMismatch(
            f"cannot append {source.info.name} to {path}: its last source {last.get('name')} is "
            "not watched to the end",
            hint=f"finish it first: the command with {last.get('name')} again",
        )
    return make_next_segment(state), {}


def check_continued_options(path: StatePath, state: StateHeader, options: IngestOptions) -> None:
    """Refuse another memory, system prompt or chunk than the state's. StateMismatch, naming the
    setting.
    """
    # Read the state's memory as a config, so that settings newer than the state have their
    # defaults.
    found = read_state_memory_config(state)
    # Whether there are words, and how large a step is, is settled where the stream begins.
    config = (options.config or found).with_words(bool(getattr(found, "words", False)))
    config = config.for_step(getattr(found, "step_tokens", 0))
    theirs = found.to_dict()
    ours = config.to_dict()
    for field in theirs:
        check_continued_field(path, f"memory.{field}", theirs[field], ours.get(field))
    # Each step attended to the others of its chunk, and has read the system prompt; without one, it
    # is the state's.
    if options.chunk is not None:
        check_continued_field(path, "chunk", (state.source or {}).get("chunk", 1), options.chunk)
    if options.system is not None:
        check_continued_field(path, "system prompt", state.settings.get("system"), options.system)


def check_continued_sampling(
    path: StatePath, state: State, backbone: Backbone, fps: float | None
) -> None:
    """Refuse another model, rate, or other frames for the model, than the state's. StateMismatch,
    naming the field.
    """
    check_state_fits(state, backbone.identity)
    check_continued_field(
        path, "fps", state.clock.fps, backbone.default_fps if fps is None else fps
    )
    for field in sorted(state.settings.keys() & backbone.settings.keys()):
        check_continued_field(path, field, state.settings[field], backbone.settings[field])


def check_continued_subtitles(path: StatePath, record: JsonRecord, subtitles: Subtitles) -> None:
    """Refuse other subtitles than those on record of a source that was begun. StateMismatch."""
    theirs = read_recorded_subtitles(record)
    ours = subtitles.record
    if record and identify_subtitles(theirs) != identify_subtitles(ours):
        was = name_subtitles(theirs) or "no subtitles"
        now = name_subtitles(ours) or "no subtitles"
        raise StateMismatch(
            f"the state at {path} cannot be continued: it has {was}, this run has {now}, or they "
            "have changed",
            hint="choose with --subtitles, write to another path, or start over with --force",
        )


def check_continued_field(path: StatePath, field: str, found: object, wanted: object) -> None:
    """Refuse a difference between a state and this run. StateMismatch, naming the field."""
    if found != wanted:
        raise StateMismatch(
            f"the state at {path} cannot be continued: its {field} is {found}, this run's is "
            f"{wanted}",
            hint="write to another path, or start over with --force",
        )
