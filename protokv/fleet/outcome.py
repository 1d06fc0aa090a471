"""What is known of one video: before the work (`Verdict`, `Looked`), after it (`Outcome`), and if it failed why.

What is left to do for a video: its state's header held against the video's content, the model and the memory.

Done means a committed, complete state whose header has the same fingerprint of the source, the same model and the same
memory. Only the header is read, and of the video what its fingerprint takes; nothing is decoded and no model loaded.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from protokv import storage
from protokv.core.records import BackboneIdentity
from protokv.core.snapshot import Header
from protokv.errors import ProtoKVError, StateCorrupt, StateMismatch, StateNotFound
from protokv.fleet.plan import Job
from protokv.fleet.recipe import Recipe
from protokv.ingestion.growing_file import has_grown_from, watched_fingerprint
from protokv.storage.checkpoint import check_fits, config_of
from protokv.storage.watched import records_of
from protokv.video import Damage
from protokv.video.file import fingerprint_of
from protokv.video.registry import registered_kind

Standing = Literal["new", "unfinished", "changed", "done"]
Status = Literal["watched", "done", "stopped", "failed"]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a video has no complete, undamaged state.

    Attributes:
        kind: the class of the error, of `protokv.errors` where a single `ingest` would have raised it; `Damaged` where
            a state was written of what could be read; `WorkerDied` where the video took its worker with it, or
            something else did, on every attempt.
        message, hint: what and where, and what to do.
    """

    kind: str
    message: str
    hint: str = ""

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """What an error says, on one line."""
        message = error.message if isinstance(error, ProtoKVError) else f"{type(error).__name__}: {error}"
        hint = error.hint if isinstance(error, ProtoKVError) else ""
        return cls(type(error).__name__, " ".join(message.split()), " ".join(hint.split()))


@dataclass(frozen=True, slots=True)
class Verdict:
    """How the state of a video stands.

    Attributes:
        standing: "new" where there is none, "unfinished" where it is to be continued, "changed" where it is to be
            started over, "done" where nothing is left.
        steps, stream_time_s, file_bytes: of the state; 0 where there is none, and file_bytes of one that is done only.
        damage: what could not be read of the video of a state that is done; empty where all was read.
    """

    standing: Standing
    steps: int = 0
    stream_time_s: float = 0.0
    file_bytes: int = 0
    damage: str = ""


@dataclass(frozen=True, slots=True)
class Looked:
    """What would be done with a video, without doing it."""

    job: Job
    state: str
    verdict: Verdict | None
    failure: Failure | None = None

    @property
    def status(self) -> str:
        """How its state stands, or "failed"."""
        return "failed" if self.verdict is None else self.verdict.standing

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        row = {**self.job.to_dict(), "state": self.state, "status": self.status}
        return row | ({} if self.failure is None else {"failure": asdict(self.failure)})


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a video.

    Attributes:
        state: where its state is, or would be.
        status: "watched" by this run to its end, "done" before it, "stopped" on request after a commit, or "failed".
        standing: how the state stood before.
        watched_s: seconds of stream that this run added.
        elapsed_s: seconds that the worker was busy with it.
        attempts: times that it was begun.
        failure: why, where it failed, and where it was watched or done but damaged.
    """

    job: Job
    state: str
    status: Status
    standing: Standing = "new"
    steps: int = 0
    stream_time_s: float = 0.0
    watched_s: float = 0.0
    file_bytes: int = 0
    elapsed_s: float = 0.0
    attempts: int = 1
    failure: Failure | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON; `failure` only where there is one."""
        row = asdict(self)
        del row["job"]
        failure = row.pop("failure")
        return {**self.job.to_dict(), **row} | ({} if failure is None else {"failure": failure})


def look_at(source: str, target: str, recipe: Recipe, identity: BackboneIdentity) -> Verdict:
    """How the state of a video stands.

    Raises:
        SourceError: the video is not there, or no file.
        StateError: the state is of another video, model, memory or rate, is corrupt, or cannot be read.
    """
    ours = fingerprint_of(source)
    try:
        header = storage.read_header(target)
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
    watched = [watched_fingerprint(record) for record in records_of(header)]
    if _has_grown(source, header):
        return Verdict("unfinished", header.clock.steps, header.clock.stream_time_s)
    if ours is None or ours not in watched:
        _check_name(target, header, source, force=recipe.force)
        return Verdict("changed")
    clock = header.clock
    if not header.complete:
        return Verdict("unfinished", clock.steps, clock.stream_time_s)
    return Verdict("done", clock.steps, clock.stream_time_s, storage.stored_bytes(target), damage_of(header))


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
