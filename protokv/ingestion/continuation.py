"""Check that a source, a memory and a model may continue a saved state, and find the source in its stream.

A continuation ends in the bytes of one uninterrupted run. So it needs the same source, model, memory and sampling rate,
and is refused with the difference named. A finished state can be continued with another source: times and positions go
on where it ends. Sources are identified by content and none is watched twice, so a command that appends one can be
repeated, after a crash and after its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from protokv import storage
from protokv.backbones.base import Backbone
from protokv.config import MemoryConfig
from protokv.core.snapshot import Header, State
from protokv.errors import StateMismatch, StateNotFound
from protokv.ingestion.growing_file import GrowingFile, watched_fingerprint
from protokv.ingestion.live.source import LiveSource
from protokv.storage.checkpoint import admit, config_of
from protokv.storage.form import StatePath
from protokv.storage.watched import Segment, next_segment, records_of, segment_of
from protokv.video import Source


def existing_state(path: StatePath) -> State | None:
    """Load the state at a path; None if there is none. StateError if it cannot be read."""
    try:
        return storage.load_state(path, admit=admit)
    except StateNotFound:
        return None


def find_segment(
    path: StatePath, state: State, source: Source | LiveSource, file: GrowingFile, *, append: bool
) -> Segment:
    """Find where the source begins in the stream of a state, or stands in it already.

    A file that has grown since is not watched to its end.

    Raises:
        StateMismatch: the state is of another source, or its last source is not watched to its end.
    """
    if isinstance(source, LiveSource):
        return _live_segment(path, state, source, append=append)
    segment, ours = segment_of(state), source.info.fingerprint
    watched = [watched_fingerprint(one) for one in records_of(state)]
    if file.has_grown_from(state.source or {}):
        return replace(segment, done=False)
    # A source without a fingerprint (frames from a program) equals no other, not even itself a moment ago.
    if not append and (ours is None or ours != watched[0]):
        raise _another_source(path, state, source)
    if ours is not None and ours == watched[-1]:
        return segment
    if ours is not None and ours in watched:
        # Another source was appended since, so this one was watched to its end.
        return Segment(done=True)
    _check_finished(path, state, source.info.name)
    return next_segment(state)


def _live_segment(path: StatePath, state: State, source: LiveSource, *, append: bool) -> Segment:
    """Find the segment of a live source: it is identified by its address and goes on in the same state."""
    record = state.source or {}
    if (record.get("kind"), record.get("name")) == (source.info.kind, source.info.name):
        return replace(segment_of(state), done=False)
    if not append:
        raise _another_source(path, state, source)
    _check_finished(path, state, source.info.name)
    return next_segment(state)


def _check_finished(path: StatePath, state: State, ours: str) -> None:
    """Refuse to append to a state whose last source is not watched to its end; a live source has no end."""
    if not state.complete and state.source is not None and "live" not in state.source:
        name = state.source.get("name")
        raise StateMismatch(
            f"cannot append {ours} to {path}: its last source {name} is not watched to the end",
            hint=f"finish it first: the command with {name} again",
        )


def _another_source(path: StatePath, state: State, source: Source | LiveSource) -> StateMismatch:
    theirs = records_of(state)[0].get("name")
    if theirs is None:
        what = "frames from a program"
    elif theirs == source.info.name:
        what = f"another {theirs}, or {theirs} as it was before it changed"
    else:
        what = f"another video, {theirs}"
    return StateMismatch(
        f"{path} is the state of {what}; this run's source is {source.info.name}",
        hint="name another state with -o, watch after it with --append, or replace it with --force",
    )


def check_memory(path: StatePath, state: Header, config: MemoryConfig) -> None:
    """Refuse another memory than the state's. StateMismatch, naming the setting."""
    # Read the state's memory as a config, so that settings newer than the state have their defaults.
    theirs, ours = config_of(state).resolve().to_dict(), config.resolve().to_dict()
    for field in theirs:
        check_equal(path, f"memory.{field}", theirs[field], ours.get(field))


def check_sampling(path: StatePath, state: State, backbone: Backbone, fps: float | None) -> None:
    """Refuse another rate, or other frames for the model, than the state's. StateMismatch, naming the field."""
    check_equal(path, "fps", state.clock.fps, backbone.default_fps if fps is None else fps)
    for field in state.settings.keys() & backbone.settings.keys():
        check_equal(path, field, state.settings[field], backbone.settings[field])


def check_chunk(path: StatePath, state: State, chunk: int) -> None:
    """Refuse another chunk than the state's, which attended to other steps. StateMismatch."""
    check_equal(path, "chunk", (state.source or {}).get("chunk", 1), chunk)


def check_equal(path: StatePath, field: str, found: object, wanted: object) -> None:
    """Refuse a difference between a state and this run. StateMismatch, naming the field."""
    if found != wanted:
        raise StateMismatch(
            f"the state at {path} cannot be continued: its {field} is {found}, this run's is {wanted}",
            hint="write to another path, or start over",
        )


def record_of(state: State, fingerprint: str | None, file: GrowingFile) -> Mapping[str, Any]:
    """Return a state's record of the source with this fingerprint, or of the file it has grown from; empty if none."""
    last = state.source or {}
    if file.has_grown_from(last):
        return last
    records = reversed(records_of(state))
    return next((one for one in records if fingerprint and watched_fingerprint(one) == fingerprint), {})
