"""A worker: it checks the work left for a video, watches it, and loads the model once.

Results are values, not exceptions, unless the model is missing, which concerns all videos. A worker knows nothing of
processes, clusters and other workers.

A video is done if its state is committed and complete and its header names the same content, model and memory. To look,
only the header and the fingerprint of the video are read; nothing is decoded and no model is loaded. For a
forecast, the header of the video is read too, and a few steps of some videos are tried.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from protokv.core.records import BackboneIdentity
from protokv.errors import PositionWarning, ProtoKVError, StateCorrupt, StateMismatch, StateNotFound
from protokv.fleet.plan import Job, target_of
from protokv.fleet.records import Failure, Footage, Outcome, Recipe, Verdict
from protokv.fleet.shared_forwards import SharedForwards
from protokv.ingestion.continuation import (
    check_equal,
    check_memory,
    check_system,
)
from protokv.ingestion.estimate import Estimate, estimate
from protokv.ingestion.events import Progress, Started, Summary
from protokv.ingestion.options import IngestOptions
from protokv.ingestion.run import find_words, ingest
from protokv.state.api import read_header, stored_bytes
from protokv.state.checkpoint import check_fits
from protokv.state.commit import writing
from protokv.state.form import is_url
from protokv.state.snapshot import Header
from protokv.state.watched import fingerprints
from protokv.video import Damage
from protokv.video.address import kind_of
from protokv.video.bucket import is_object
from protokv.video.registry import fingerprint_source, open_source
from protokv.words.find import AUTO, OFF, file_of, identity, record_of_file, recorded, two_letters

if TYPE_CHECKING:
    from protokv.core.backbone import Backbone


class Worker:
    """One model on one device, and one video at a time, or a few that share its forwards."""

    def __init__(
        self,
        recipe: Recipe,
        device: str,
        should_stop: Callable[[], bool] | None = None,
        report: Callable[[int, float, float], None] = lambda place, watched_s, left_s: None,
    ) -> None:
        """Load nothing yet.

        Args:
            recipe: of all videos.
            device: of the model.
            should_stop: called after every step; `stop` has the same effect.
            report: called after every step with the place of the video among those that are watched together, the
                seconds of stream that this run added, and those that are left (NaN: unknown).
        """
        self._recipe, self._device, self._report = recipe, device, report
        self._asked = should_stop or (lambda: False)
        self._stopped = False

    @cached_property
    def _identity(self) -> BackboneIdentity:
        return self._recipe.identify(self._device)

    def stop(self) -> None:
        """Let `watch` commit and return after its step. May be called from another thread."""
        self._stopped = True

    @cached_property
    def _backbone(self) -> Backbone:
        return self._recipe.load(self._device)

    def load(self) -> None:
        """Load the model, the first time. Raises as `load_backbone`."""
        _ = self._backbone

    def look(self, job: Job) -> Verdict | Failure:
        """Return the work left for a video. Raises if the model cannot be identified."""
        # An error of the model concerns all videos.
        identity = self._identity
        try:
            return look_at(job.source, target_of(self._recipe.place, job.key), self._recipe, identity)
        except Exception as error:
            return Failure.of(error)

    def probe(self, job: Job) -> Footage | Failure | None:
        """Return facts of a video from its header and first frame; None of one that is no file."""
        if is_object(job.source) or kind_of(job.source) != "file":
            return None
        options = self._recipe.options
        try:
            # This process is a worker's own: a file that crashes it is a failure of that file.
            with open_source(job.source, options.decoder, max_pixels=options.max_frame_pixels) as opened:
                info = opened.info
        except Exception as error:
            return Failure.of(error)
        return Footage(info.duration_s, info.width, info.height, info.rate_fps)

    def estimate(self, job: Job) -> tuple[Estimate, float] | Failure:
        """Watch the first steps of a video and forget them; also return the seconds before the first step.

        Raises as `load_backbone`.
        """
        options, backbone, began = self._recipe.options, self._backbone, time.perf_counter()
        try:
            with open_source(job.source, options.decoder, max_pixels=options.max_frame_pixels, isolate=True) as opened:
                opening_s = time.perf_counter() - began
                words = find_words(job.source, opened, replace(options, device=self._device))
                return estimate(opened, backbone, options, words), opening_s
        except Exception as error:
            return Failure.of(error)

    def watch(self, job: Job, verdict: Verdict) -> Outcome:
        """Ingest the rest of a video."""
        return self._watch(job, verdict, self._backbone)

    def watch_together(self, pairs: Sequence[tuple[Job, Verdict]]) -> list[Outcome]:
        """Ingest the rest of some videos, a thread each; their steps share forwards of the model."""
        shared = SharedForwards(self._backbone, len(pairs))

        def watch(pair: tuple[Job, Verdict], place: int) -> Outcome:
            with shared.member() as backbone:
                return self._watch(*pair, backbone, place)

        with ThreadPoolExecutor(len(pairs), "stream") as threads:
            return list(threads.map(watch, pairs, range(len(pairs))))

    def _watch(self, job: Job, verdict: Verdict, backbone: Backbone, place: int = 0) -> Outcome:
        target, began = target_of(self._recipe.place, job.key), time.perf_counter()
        anew = verdict.standing == "changed"
        options = replace(self._recipe.options, backbone=backbone, device=self._device, overwrite=anew)
        from_s, summary = 0.0, None
        try:
            if not is_url(target):
                with writing(target):
                    Path(target).parent.mkdir(parents=True, exist_ok=True)
            with warnings.catch_warnings():
                # It would come for every video, without a reader.
                warnings.simplefilter("ignore", PositionWarning)
                for event in ingest(job.source, target, options=options, should_stop=self._should_stop):
                    if isinstance(event, Started):
                        from_s = event.stream_time_s
                    elif isinstance(event, Progress):
                        left_s = math.nan if event.duration_s is None else event.duration_s - event.stream_time_s
                        self._report(place, event.stream_time_s - from_s, left_s)
                    elif isinstance(event, Summary):
                        summary = event
        except Exception as error:
            elapsed_s = time.perf_counter() - began
            return Outcome(job, target, "failed", verdict.standing, elapsed_s=elapsed_s, failure=Failure.of(error))
        assert summary is not None
        stopped = not summary.complete and not summary.damaged
        return Outcome(
            job,
            target,
            "stopped" if stopped else "watched",
            verdict.standing,
            steps=summary.steps,
            stream_time_s=summary.stream_time_s,
            watched_s=summary.stream_time_s - from_s,
            file_bytes=summary.file_bytes,
            elapsed_s=time.perf_counter() - began,
            failure=Failure("Damaged", lost) if (lost := summary.damage or summary.words_lost) else None,
        )

    def _should_stop(self) -> bool:
        return self._stopped or self._asked()


def look_at(source: str, target: str, recipe: Recipe, identity: BackboneIdentity) -> Verdict:
    """Return the work left for a video.

    Raises:
        SourceError: the video is not there, or no file.
        StateError: the state is of another video, model, memory or rate, is corrupt, or cannot be read.
    """
    ours, force = fingerprint_source(source), recipe.options.overwrite
    try:
        header = read_header(target)
        _check_settings(target, header, recipe, identity)
    except StateNotFound:
        return Verdict("new")
    except (StateCorrupt, StateMismatch):
        if force:
            return Verdict("changed")
        raise
    clock = header.clock
    unfinished = Verdict("unfinished", clock.steps, clock.stream_time_s)
    if ours is None or ours not in fingerprints(header):
        if not force:
            _check_name(target, header, source)
        return Verdict("changed")
    if _has_other_words(source, header, recipe.options):
        return Verdict("changed")
    if not header.complete:
        return unfinished
    return Verdict("done", clock.steps, clock.stream_time_s, stored_bytes(target), damage_of(header))


def damage_of(header: Header) -> str:
    """Return the damage of the last source of a state, or of its subtitles; empty if all was read."""
    lost = str(recorded(header.source).get("lost") or "")
    return Damage.from_dict((header.source or {}).get("damage")).message or lost


def _has_other_words(source: str, header: Header, options: IngestOptions) -> bool:
    """Return True if the subtitles of a video came, went or changed; a track of its container changes with it."""
    before, choice = recorded(header.source), options.subtitles
    file = file_of(source, choice)
    if file is not None:
        return identity(before) != record_of_file(file)
    if choice in (AUTO, OFF):
        return before.get("kind") == "file" or (choice == OFF and before != {})
    return two_letters(str(before.get("language", ""))) != two_letters(choice)


def _check_settings(target: str, header: Header, recipe: Recipe, identity: BackboneIdentity) -> None:
    """Refuse a state of another model, memory, system prompt, rate or cost of a frame."""
    try:
        check_fits(header, identity)
        check_memory(target, header, recipe.options.config)
        check_system(target, header, recipe.options.system)
        if recipe.options.fps is not None:
            check_equal(target, "fps", header.clock.fps, recipe.options.fps)
        for name, wanted in recipe.options.frames.items():
            if wanted is not None:
                check_equal(target, name, header.settings.get(name, "the model's own"), wanted)
    except ProtoKVError as error:
        hint = "ingest into another folder, or start such states over with --force"
        raise type(error)(error.message, hint=hint) from error


def _check_name(target: str, header: Header, source: str) -> None:
    """Refuse a state of a video of another name. One that changed under its name is watched anew."""
    theirs, ours = (header.source or {}).get("name"), PurePosixPath(os.fspath(source).replace(os.sep, "/")).name
    if theirs != ours:
        raise StateMismatch(
            f"the state {target} is of {theirs}, not of {ours}",
            hint="ingest into another folder, give the video a key of its own, or start it over with --force",
        )
