"""`ingest`, and `ingest_events`: stream a source through a session into a state, with commits on
the way.

Owns the work before the first step: open the source, lock the state, start a session or continue
the saved one. The run itself is in `watching`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from protokv.bucket import in_bucket
from protokv.errors import ConfigError, StateNotFound
from protokv.ingestion import continuation
from protokv.ingestion.events import IngestEvent, IngestSummary
from protokv.ingestion.live import LiveSource, open_live_source
from protokv.ingestion.options import (
    COMMIT_WHEN_LIVE,
    EVERY_MINUTE,
    FILE_CHUNK_STEPS,
    IngestOptions,
    IngestSettings,
)
from protokv.ingestion.prefetch import STOP_POLL_S, StopRequest
from protokv.ingestion.watching import IngestRun, RunItem, RunSetup
from protokv.memories import MemoryConfig
from protokv.state.reader import load_state
from protokv.state.sources import StreamSegment, read_standing_answers
from protokv.state.store import StatePath, find_store, make_state_name, refuse_input_as_target
from protokv.stream.seeing import StepsToWatch, watch_together
from protokv.stream.session import Session
from protokv.timings import Timings, time_stage
from protokv.video import Source, address, open_source
from protokv.video.source import ShouldStop, never_stop
from protokv.words.cues import Subtitles
from protokv.words.find import find_subtitles
from protokv.words.transcript import Transcript

AnySource = str | os.PathLike[str] | Source


class _IngestKeywords(IngestSettings, total=False):
    """The keywords of `ingest`: those of `ingest_events`."""

    options: IngestOptions | None
    should_stop: ShouldStop
    timings: Timings | None


def ingest(
    source: AnySource,
    target: StatePath | None = None,
    config: MemoryConfig | None = None,
    **options: Unpack[_IngestKeywords],
) -> IngestSummary:
    """Watch a source, or the rest of it, and keep the state on disk; return what came of it.

    Arguments and errors are those of `ingest_events`, which tells what happens meanwhile.
    """
    *_, last = ingest_events(source, target, config, **options)
    assert isinstance(last, IngestSummary)
    return last


def ingest_events(
    source: AnySource,
    target: StatePath | None = None,
    config: MemoryConfig | None = None,
    *,
    options: IngestOptions | None = None,
    should_stop: ShouldStop = never_stop,
    timings: Timings | None = None,
    **settings: Unpack[IngestSettings],
) -> Generator[IngestEvent, None, None]:
    """Watch a source, or the rest of it, and keep the state on disk.

    An existing state at `target` is continued. The steps that were watched are committed whatever
    ends the run: a damaged source, a request to stop, an error, or the caller who closes this
    iterator. The source is opened when the first event is asked for.

    Args:
        source: a path, an address (`protokv.video.address`), or an open source, which is left open.
        target: where the state goes; None: the name of the source with `.safetensors`, in the
            current folder.
        config: the memory; None: that of `options`, of the state, or the default.
        options: how to watch the source and keep its state.
        should_stop: asked after every step or chunk, and while waiting for a frame.
        timings: adds up seconds by stage; None: nothing is timed.
        settings: fields of `IngestOptions` by name, such as `fps=1.0`; they replace those of
            `options`.

    Yields:
        One `IngestStarted`, an `IngestProgress` after every step, a `Commit` for every state on
        disk, answers to standing questions, news of a live source, and last an `IngestSummary`.

    Raises:
        ConfigError: an option is out of range, two contradict each other, or the state would
            replace the source.
        SourceError: the source is not there, or not one frame of it can be read.
        StateError: the state is locked, does not fit, is corrupt or cannot be written.
        ModelError: the model cannot be loaded.
    """
    options = replace(options or IngestOptions(), **settings)
    if config is not None:
        options = replace(options, config=config)
    with closing(begin_run(source, target, options, should_stop, timings)) as items:
        for item in items:
            if isinstance(item, StepsToWatch):
                watch_together([item])
            elif item is not None:
                yield item


def begin_run(
    source: AnySource,
    target: StatePath | None,
    options: IngestOptions,
    should_stop: ShouldStop,
    timings: Timings | None = None,
    poll_s: float = STOP_POLL_S,
) -> Generator[RunItem, None, None]:
    """Do what `ingest_events` does, but leave the steps to the caller, and yield None where a live
    source gave nothing for `poll_s`.
    """
    name = os.fspath(source) if isinstance(source, str | os.PathLike) else source.info.name
    # The name of an object is the last part of its address.
    stem = Path(name).stem if in_bucket(name) else address.source_stem(name)
    path = make_state_name(stem) if target is None else target
    refuse_input_as_target(path, source)
    find_store(path).check_target()
    with ExitStack() as opened:
        video = _open_source(source, options, opened)
        # Lock before the state is read, so that nobody else writes between this and the first
        # commit.
        store = opened.enter_context(find_store(path, keep=options.keep))
        subtitles = find_subtitles(video, source, options.subtitles, options.start_s)
        start = _start(path, video, subtitles, options, timings)
        live = isinstance(video, LiveSource)
        session = start.session
        began_s = time.monotonic()
        for_s = (video.options if isinstance(video, LiveSource) else options.live).for_s
        from_s = session.clock.stream_time_s

        def reaches_end() -> bool:
            # Stream time stands still while a live source is lost.
            gone_s = max(
                session.clock.stream_time_s - from_s, time.monotonic() - began_s if live else 0.0
            )
            return for_s is not None and gone_s >= for_s

        every = options.every or (COMMIT_WHEN_LIVE if live else EVERY_MINUTE)
        run = IngestRun(start, video, store, options, timings, poll_s)
        yield from run.watch(every, StopRequest(should_stop, reaches_end))


def _open_source(source: AnySource, options: IngestOptions, opened: ExitStack) -> Source:
    """Return the part of the source that is to be watched; open it unless it is open already."""
    video = source
    if isinstance(video, str | os.PathLike):
        pixels = options.max_frame_pixels
        found = open_live_source(video, options.live, pixels)
        video = opened.enter_context(
            found or open_source(video, options.decoder, max_pixels=pixels)
        )
    if not isinstance(video, LiveSource):
        return options.cut_part(video)
    if options.start_s or options.duration_s is not None or (options.chunk or 1) > 1:
        raise ConfigError(
            f"{video.info.name} is live; parts and chunks are of files", hint="use --for"
        )
    return video


def _start(
    path: StatePath,
    video: Source,
    subtitles: Subtitles,
    options: IngestOptions,
    timings: Timings | None,
) -> RunSetup:
    state = None
    with suppress(StateNotFound):
        state = None if options.overwrite else load_state(path)
    if state is None:
        with time_stage(timings, "model"):
            model = options.load_model()
        with time_stage(timings, "state"):
            config = options.config_for(subtitles)
            session = Session.start(model, config, fps=options.fps, attachments=[Transcript()])
            chunk = options.chunk or (1 if isinstance(video, LiveSource) else FILE_CHUNK_STEPS)
            return RunSetup(session, StreamSegment(), {}, subtitles, chunk)
    segment, record = continuation.find_continued_segment(path, state, video, append=options.append)
    continuation.check_continued_subtitles(path, record, subtitles)
    continuation.check_continued_options(path, state, options)
    with time_stage(timings, "model"):
        model = options.load_model(state)
    continuation.check_continued_sampling(path, state, model, options.fps)
    with time_stage(timings, "state"):
        session = Session.restore(state, model)
    if isinstance(video, LiveSource):
        video.continue_from(record, state.clock.stream_time_s)
    chunk = options.chunk or (state.source or {}).get("chunk", 1)
    return RunSetup(session, segment, record, subtitles, chunk, read_standing_answers(state))
