"""A worker: it says what is left to do for a video, watches it, and loads the model once.

A failure of a video is a result and no exception. A missing model is an exception, since it
concerns all videos. A video is done if its state is complete and its header names the same
content, model and memory. Only the header and the fingerprint are read for that.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Literal

from protokv.backbones import identify_backbone
from protokv.bucket import in_bucket
from protokv.core.backbone import BackboneIdentity
from protokv.errors import PositionWarning, ProtoKVError, StateCorrupt, StateMismatch, StateNotFound
from protokv.fleet.plan import VideoJob, locate_fleet_state
from protokv.ingestion.continuation import check_continued_field, check_continued_options
from protokv.ingestion.events import IngestSummary, SourceNoted
from protokv.ingestion.options import IngestOptions
from protokv.ingestion.run import ingest_events
from protokv.state.checkpoint import check_state_fits
from protokv.state.folder import read_recorded_damage
from protokv.state.header import StateHeader
from protokv.state.reader import StateReader
from protokv.state.sources import read_fingerprints
from protokv.texts import JsonObject
from protokv.video.address import source_kind
from protokv.video.registry import fingerprint_source, open_source
from protokv.video.source import ShouldStop, never_stop
from protokv.words import find as words

if TYPE_CHECKING:
    from protokv.core.backbone import Backbone

_Status = Literal["new", "unfinished", "changed", "done", "watched", "stopped", "failed"]


@dataclass(frozen=True, kw_only=True)
class JobRecipe:
    """How every video of a fleet becomes a state.

    `backbone` of the options is a name, which each worker loads once. Their `overwrite` starts over
    a state of other settings or of another video; without it such a video fails.
    """

    place: str  # folder, or prefix in an object store, of the states
    options: IngestOptions = field(default_factory=IngestOptions)  # options of each ingest

    def load(self, device: str) -> Backbone:
        """Load the model. Raises as `IngestOptions.load_model`."""
        return replace(self.options, device=device).load_model()

    def identify(self, device: str) -> BackboneIdentity:
        """Return the identity of the model that `load` would give, from its small files. Raises as
        `load_backbone`.
        """
        return identify_backbone(**replace(self.options, device=device).new_model)


@dataclass(frozen=True, slots=True)
class VideoFailure:
    """Why a video has no complete, undamaged state."""

    # the error of a single `ingest`; Damaged: the state has what could be read; WorkerDied: at each
    # attempt
    kind: str
    message: str  # the failure, in one line
    hint: str = ""  # a way out of it

    @classmethod
    def from_error(cls, error: Exception) -> VideoFailure:
        """Return an error on one line."""
        kind = type(error).__name__
        told = error if isinstance(error, ProtoKVError) else ProtoKVError(f"{kind}: {error}")
        return cls(kind, " ".join(told.message.split()), " ".join(told.hint.split()))


@dataclass(frozen=True, slots=True)
class VideoOutcome:
    """What is left to do for a video before a run, or the result of it.

    Status before: "new" without a state, "unfinished" to continue it, "changed" to start over.
    After: "watched" to its end by this run, or "stopped" on request after a commit. Both: "done"
    before this run, or "failed".
    """

    job: VideoJob
    state: str  # its path
    status: _Status
    standing: _Status = "new"  # the status before the run
    steps: int = 0  # of the state now
    stream_time_s: float = 0.0  # of the state now
    watched_s: float = 0.0  # seconds of stream that this run added
    # seconds of stream to watch; None: not looked up, or the video does not say
    left_s: float | None = None
    file_bytes: int = 0  # of the state now
    elapsed_s: float = 0.0  # seconds that the worker was busy with it
    attempts: int = 1  # how often it was begun
    failure: VideoFailure | None = None  # why it failed; of a watched or finished video, its damage
    notes: tuple[str, ...] = ()  # notes for the user on the video that are no damage

    def to_dict(self) -> JsonObject:
        """Return plain JSON; `failure` only if there is one."""
        row = self.job.to_dict() | asdict(self)
        return {
            name: value
            for name, value in row.items()
            if name != "job" and (name, value) != ("failure", None)
        }


class FleetWorker:
    """One model on one device, and one video at a time."""

    def __init__(
        self, recipe: JobRecipe, device: str, should_stop: ShouldStop = never_stop
    ) -> None:
        """Load nothing yet. `should_stop` is called after every step."""
        self._recipe = recipe
        self._device = device
        self._should_stop = should_stop
        self._identity: BackboneIdentity | None = None
        self._backbone: Backbone | None = None

    def load(self) -> None:
        """Load the model, the first time. Raises as `load_backbone`."""
        self._backbone = self._backbone or self._recipe.load(self._device)

    def examine(self, job: VideoJob) -> VideoOutcome:
        """Return what is left to do for a video. Raises if there is no model, which concerns all
        videos.
        """
        self._identity = self._identity or self._recipe.identify(self._device)
        return check_video_status(job, self._recipe, self._identity)

    def watch(self, found: VideoOutcome) -> VideoOutcome:
        """Ingest what is left of a video, as `check_video_status` found it."""
        self.load()
        began = time.perf_counter()
        notes = list[str]()
        anew = found.status == "changed"
        options = replace(
            self._recipe.options, backbone=self._backbone, device=self._device, overwrite=anew
        )
        try:
            with warnings.catch_warnings():
                # The position warning would repeat for every video, and nobody reads stderr here.
                warnings.simplefilter("ignore", PositionWarning)
                for event in ingest_events(
                    found.job.source, found.state, options=options, should_stop=self._should_stop
                ):
                    if isinstance(event, SourceNoted):
                        notes.append(event.note)
                    elif isinstance(event, IngestSummary):
                        summary = event
        except Exception as error:
            failure = VideoFailure.from_error(error)
            return replace(
                found, status="failed", elapsed_s=time.perf_counter() - began, failure=failure
            )
        state: JsonObject = {
            name: getattr(summary, name) for name in ("steps", "stream_time_s", "file_bytes")
        }
        return replace(
            found,
            **state,
            status="watched" if summary.complete or summary.damaged else "stopped",
            watched_s=summary.stream_time_s - found.stream_time_s,
            elapsed_s=time.perf_counter() - began,
            failure=VideoFailure("Damaged", damage)
            if (damage := summary.damage or summary.words_lost)
            else None,
            notes=tuple(notes),
        )


def preview_fleet(jobs: Iterable[VideoJob], recipe: JobRecipe) -> Iterator[VideoOutcome]:
    """Yield what a run would do with each video, with the seconds left; writes nothing. Raises if
    there is no model.
    """
    identity = recipe.identify(recipe.options.device)
    options = recipe.options
    for job in jobs:
        found = check_video_status(job, recipe, identity)
        if (
            found.status not in ("done", "failed")
            and source_kind(job.source) == "file"
            and not in_bucket(job.source)
        ):
            try:
                with open_source(
                    job.source, options.decoder, max_pixels=options.max_frame_pixels
                ) as opened:
                    found = replace(found, notes=tuple(opened.notes))
                    if opened.info.duration_s is not None:
                        found = replace(
                            found, left_s=max(0.0, opened.info.duration_s - found.stream_time_s)
                        )
            except Exception as error:
                found = replace(found, status="failed", failure=VideoFailure.from_error(error))
        yield found


def check_video_status(
    job: VideoJob, recipe: JobRecipe, identity: BackboneIdentity
) -> VideoOutcome:
    """Return what is left to do for a video, by the header of its state.

    It fails if the video is not there, or if the state cannot be read or is of another video,
    model, memory or rate.
    """
    target = locate_fleet_state(recipe.place, job.key)
    try:
        ours = fingerprint_source(job.source)
        try:
            reader = StateReader.open(target)
            _check_settings(target, reader.header, recipe, identity)
        except StateNotFound:
            return VideoOutcome(job, target, "new")
        except (StateCorrupt, StateMismatch):
            if not recipe.options.overwrite:
                raise
            return VideoOutcome(job, target, "changed", "changed")
        header = reader.header
        if _is_changed(job.source, target, ours, header, recipe.options):
            return VideoOutcome(job, target, "changed", "changed")
        status: _Status = "done" if header.complete else "unfinished"
        found = VideoOutcome(
            job, target, status, status, header.clock.steps, header.clock.stream_time_s
        )
        if status == "unfinished":
            return found
        failure = (
            VideoFailure("Damaged", damage) if (damage := read_recorded_damage(header)) else None
        )
        return replace(found, left_s=0.0, file_bytes=reader.file_bytes, failure=failure)
    except Exception as error:
        return VideoOutcome(job, target, "failed", failure=VideoFailure.from_error(error))


def _is_changed(
    source: str, target: str, ours: str | None, header: StateHeader, options: IngestOptions
) -> bool:
    """Return True if a video, or its subtitles, is not the one that a state has watched.
    StateMismatch.
    """
    if ours is None or ours not in read_fingerprints(header):
        # A video that changed under its name is watched anew; one of another name needs --force.
        theirs = (header.source or {}).get("name")
        name = PurePosixPath(source.replace(os.sep, "/")).name
        if theirs != name and not options.overwrite:
            raise StateMismatch(
                f"the state {target} is of {theirs}, not of {name}",
                hint="ingest into another folder, give the video a key of its own, or start it "
                "over with --force",
            )
        return True
    # A text track changes with its container.
    before = words.read_recorded_subtitles(header.source)
    choice = options.subtitles
    file = words.find_subtitle_file(source, choice, forced=before.get("kind") != "track")
    if file is not None:
        return words.identify_subtitles(before) != words.describe_subtitle_file(file)
    if choice in (words.SUBTITLES_AUTO, words.SUBTITLES_OFF):
        return before.get("kind") == "file" or (choice == words.SUBTITLES_OFF and before != {})
    return words.shorten_language(str(before.get("language", ""))) != words.shorten_language(choice)


def _check_settings(
    target: str, header: StateHeader, recipe: JobRecipe, identity: BackboneIdentity
) -> None:
    """Refuse a state of another model, memory, system prompt, rate or cost of a frame."""
    options = recipe.options
    check_state_fits(header, identity)
    check_continued_options(target, header, options)
    if options.fps is not None:
        check_continued_field(target, "fps", header.clock.fps, options.fps)
    if options.frame_tokens is not None:
        theirs = header.settings.get("frame_tokens", "the model's own")
        check_continued_field(target, "frame_tokens", theirs, options.frame_tokens)
