"""What a worker does with a video, wherever it runs: look, and watch; and once in its life load the model.

Every result is a value, not an exception, except where the model cannot be had: that is wrong for all videos. Knows
nothing of processes, clusters and other workers.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from protokv.backbones.together import Together
from protokv.errors import PositionWarning, StateLocked
from protokv.fleet.outcome import Failure, Outcome, Verdict, look_at
from protokv.fleet.plan import Job, target_of
from protokv.fleet.recipe import Recipe
from protokv.ingestion.events import Started, Summary
from protokv.ingestion.options import IngestOptions
from protokv.ingestion.run import ingest
from protokv.storage.form import is_url

if TYPE_CHECKING:
    from protokv.backbones.base import Backbone
    from protokv.core.records import BackboneIdentity


class Worker:
    """One model on one device, and one video at a time."""

    def __init__(self, recipe: Recipe, device: str, should_stop: Callable[[], bool] | None = None) -> None:
        """Nothing is loaded yet.

        Args:
            recipe: what is the same for all videos.
            device: where the model goes.
            should_stop: asked after every step, besides `stop`.
        """
        self._recipe, self._device = recipe, device
        self._asked = should_stop or (lambda: False)
        self._stopped = False
        self._backbone: Backbone | None = None

    @cached_property
    def _identity(self) -> BackboneIdentity:
        return self._recipe.model.identify(self._device)

    def stop(self) -> None:
        """Let `watch` commit and return after its step. May be called from another thread."""
        self._stopped = True

    def load(self) -> bool:
        """Load the model, the first time; whether this was it. Raises as `load_backbone`."""
        if self._backbone is not None:
            return False
        self._backbone = self._recipe.model.load(self._device)
        return True

    def look(self, job: Job) -> Verdict | Failure:
        """How the state of a video stands. Raises where the model cannot be identified."""
        identity = self._identity
        try:
            return look_at(job.source, target_of(self._recipe.place, job.key), self._recipe, identity)
        except Exception as error:
            return Failure.of(error)

    def watch(self, job: Job, verdict: Verdict) -> Outcome:
        """Ingest what is left of a video."""
        self.load()
        assert self._backbone is not None
        return self._watch(job, verdict, self._backbone)

    def watch_together(self, pairs: Sequence[tuple[Job, Verdict]]) -> list[Outcome]:
        """Ingest what is left of some videos, a thread each; their steps share forwards of the model."""
        self.load()
        assert self._backbone is not None
        together = Together(self._backbone, len(pairs))

        def watch(pair: tuple[Job, Verdict]) -> Outcome:
            with together.member() as backbone:
                return self._watch(*pair, backbone)

        with ThreadPoolExecutor(len(pairs), "stream") as threads:
            return list(threads.map(watch, pairs))

    def _watch(self, job: Job, verdict: Verdict, backbone: Backbone) -> Outcome:
        recipe, target, began = self._recipe, target_of(self._recipe.place, job.key), time.perf_counter()
        from_s, summary = 0.0, None
        try:
            if not is_url(target):
                Path(target).parent.mkdir(parents=True, exist_ok=True)
            with warnings.catch_warnings():
                # Of every video again, and nobody is there to read it.
                warnings.simplefilter("ignore", PositionWarning)
                options = IngestOptions(
                    config=recipe.config,
                    backbone=backbone,
                    fps=recipe.fps,
                    every=recipe.every,
                    keep=recipe.keep,
                    overwrite=verdict.standing == "changed",
                    decoder=recipe.decoder,
                    max_frame_pixels=recipe.max_frame_pixels,
                )
                for event in ingest(job.source, target, options=options, should_stop=self._should_stop):
                    if isinstance(event, Started):
                        from_s = event.stream_time_s
                    elif isinstance(event, Summary):
                        summary = event
        except Exception as error:
            found = self._elsewhere(job, error)
            if isinstance(found, Failure):
                return Outcome(
                    job, target, "failed", verdict.standing, elapsed_s=time.perf_counter() - began, failure=found
                )
            return Outcome(job, target, "done", found.standing, found.steps, found.stream_time_s)
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
            failure=Failure("Damaged", summary.damage) if summary.damaged else None,
        )

    def _elsewhere(self, job: Job, error: Exception) -> Verdict | Failure:
        """Another fleet may have finished the video meanwhile, and then nothing is wrong."""
        verdict = self.look(job) if isinstance(error, StateLocked) else None
        if isinstance(verdict, Verdict) and verdict.standing == "done":
            return verdict
        return Failure.of(error)

    def _should_stop(self) -> bool:
        return self._stopped or self._asked()
