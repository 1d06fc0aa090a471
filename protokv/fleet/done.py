"""What is left to do for a video: its state's header held against the video's content, the model and the memory.

Done means a committed, complete state whose header has the same fingerprint of the source, the same model and the same
memory. Only the header is read, and of the video what its fingerprint takes; nothing is decoded and no model loaded.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

from protokv import snapshot
from protokv.checkpoint import check_fits, config_of
from protokv.errors import ProtoKVError, StateCorrupt, StateMismatch, StateNotFound
from protokv.fleet.outcome import Verdict
from protokv.fleet.recipe import Recipe
from protokv.ingestion.growth import fingerprint_of as watched_as
from protokv.ingestion.growth import has_grown_from
from protokv.records import BackboneIdentity
from protokv.segments import records_of
from protokv.snapshot import Header
from protokv.video import Damage
from protokv.video.fingerprint import fingerprint_of
from protokv.video.registry import registered_kind


def look_at(source: str, target: str, recipe: Recipe, identity: BackboneIdentity) -> Verdict:
    """How the state of a video stands.

    Raises:
        SourceError: the video is not there, or no file.
        StateError: the state is of another video, model, memory or rate, is corrupt, or cannot be read.
    """
    ours = fingerprint_of(source)
    try:
        header = snapshot.read_header(target)
    except StateNotFound:
        return Verdict("new")
    except StateCorrupt:
        if recipe.force:
            return Verdict("changed")
        raise
    try:
        _check_recipe(target, header, recipe, identity)
    except StateMismatch:
        if recipe.force:
            return Verdict("changed")
        raise
    watched = [watched_as(record) for record in records_of(header)]
    if _has_grown(source, header):
        return Verdict("unfinished", header.clock.steps, header.clock.stream_time_s)
    if ours is None or ours not in watched:
        _check_name(target, header, source, force=recipe.force)
        return Verdict("changed")
    clock = header.clock
    if not header.complete:
        return Verdict("unfinished", clock.steps, clock.stream_time_s)
    return Verdict("done", clock.steps, clock.stream_time_s, snapshot.stored_bytes(target), damage_of(header))


def _has_grown(source: str, header: Header) -> bool:
    """A file that is longer than it was when it was watched to its end is watched on."""
    if registered_kind(source) != "file":
        return False
    return has_grown_from(Path(source), Path(source).stat().st_size, header.source or {})


def damage_of(header: Header) -> str:
    """What a state says that could not be read of its last source; empty where all was."""
    return Damage.from_dict((header.source or {}).get("damage")).message


def _check_recipe(target: str, header: Header, recipe: Recipe, identity: BackboneIdentity) -> None:
    try:
        check_fits(header, identity)
        theirs, ours = config_of(header).resolve().to_dict(), recipe.config.resolve().to_dict()
        for name in theirs.keys() | ours.keys():
            if theirs.get(name) != ours.get(name):
                raise StateMismatch(f"its memory.{name} is {theirs.get(name)}, this run's is {ours.get(name)}")
        if recipe.fps is not None and header.clock.fps != recipe.fps:
            raise StateMismatch(f"its fps is {header.clock.fps:g}, this run's is {recipe.fps:g}")
    except ProtoKVError as error:
        raise type(error)(
            f"the state {target} was made otherwise: {error.message}",
            hint="ingest into another folder, or start such states over with --force",
        ) from error


def _check_name(target: str, header: Header, source: str, *, force: bool) -> None:
    """A video that changed under its name is watched anew; one of another name has lost its place to this one."""
    named, ours = (header.source or {}).get("name"), PurePosixPath(os.fspath(source).replace(os.sep, "/")).name
    if named != ours and not force:
        raise StateMismatch(
            f"the state {target} is of {named}, not of {ours}",
            hint="ingest into another folder, give the video a key of its own, or start it over with --force",
        )
