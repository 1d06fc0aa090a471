"""`ingest`: stream a source through a session into a state, with commits on the way.

Owns the work before the first step: open the source, lock the state, start a session or continue the saved one. The
run itself is in `watching`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from protokv.backbones import load_backbone
from protokv.core.backbone import Backbone
from protokv.core.session import Session
from protokv.errors import ConfigError, StateNotFound
from protokv.ingestion.continuation import (
    check_chunk,
    check_memory,
    check_sampling,
    check_subtitles,
    check_system,
    existing_state,
    find_segment,
    record_of,
)
from protokv.ingestion.events import Event
from protokv.ingestion.live.source import LiveSource, open_input
from protokv.ingestion.options import LIVE, MINUTELY, Ending, IngestOptions
from protokv.ingestion.watching import LiveRun, Run, Start
from protokv.memories import MemoryConfig
from protokv.state.api import check_not_read, check_target
from protokv.state.checkpoint import from_state, load_backbone_of
from protokv.state.form import DEFAULT_SUFFIX, StatePath
from protokv.state.snapshot import State
from protokv.state.thumbnails import Thumbnails
from protokv.state.watched import Segment
from protokv.state.writer import Writer
from protokv.timings import Timings, stage
from protokv.video import Source, address, open_source
from protokv.video.bucket import is_object
from protokv.video.derived import Part
from protokv.video.source import never
from protokv.words import Words
from protokv.words.find import words_of, write_subtitles
from protokv.words.transcript import Transcript

AnySource = str | os.PathLike[str] | Source | LiveSource


def ingest(
    source: AnySource,
    target: StatePath | None = None,
    config: MemoryConfig | None = None,
    *,
    options: IngestOptions | None = None,
    should_stop: Callable[[], bool] = never,
    timings: Timings | None = None,
    **settings: Any,
) -> Generator[Event, None, None]:
    """Watch a source, or the rest of it, and keep the state on disk.

    An existing state at `target` is continued. The steps that were watched are committed whatever ends the run: a
    damaged source, a request to stop, an error, or the caller who closes this iterator. The source is opened when the
    first event is asked for.

    Args:
        source: a path, an address (`protokv.video.address`), or an open source, which is left open.
        target: where the state goes; None: the name of the source with `.safetensors`, in the current folder.
        config: the memory; None: that of `options`.
        options: how to watch the source and keep its state.
        should_stop: asked after every step or chunk, and while waiting for a frame.
        timings: adds up seconds by stage; None: nothing is timed.
        settings: fields of `IngestOptions` by name, such as `fps=1.0`; they replace those of `options`.

    Yields:
        One `Started`, a `Progress` after every step, a `Commit` for every state on disk, news of a live source,
        and last a `Summary`.

    Raises:
        ConfigError: an option is out of range, two contradict each other, or the state would replace the source.
        SourceError: the source is not there, or not one frame of it can be read.
        StateError: the state is locked, does not fit, is corrupt or cannot be written.
        ModelError: the model cannot be loaded.
    """
    if config is not None:
        settings["config"] = config
    return _events(source, target, replace(options or IngestOptions(), **settings), should_stop, timings)


def default_target(source: AnySource) -> str:
    """Return where the state of a source goes by default: its name with the default suffix, in the current folder."""
    name = os.fspath(source) if isinstance(source, str | os.PathLike) else source.info.name
    # The name of an object is the last part of its address.
    return (Path(name).stem if is_object(name) else address.default_stem(name)) + DEFAULT_SUFFIX


def _events(
    source: AnySource,
    target: StatePath | None,
    options: IngestOptions,
    should_stop: Callable[[], bool],
    timings: Timings | None,
) -> Generator[Event, None, None]:
    path = default_target(source) if target is None else target
    check_not_read(path, source)
    check_target(path)
    if options.transcribe is not None:
        write_subtitles(source, options.subtitles, options.transcribe, options.device, should_stop)
    with ExitStack() as held:
        video = _open_source(source, options, held)
        live = video.options if isinstance(video, LiveSource) else options.live
        # Lock before the state is read, so that nobody else writes between this and the first commit.
        writer = held.enter_context(Writer(path, keep=options.keep))
        words = find_words(source, video, options)
        start = _start(path, video, words, options, timings)
        kept = [one for one in start.session.attachments if isinstance(one, Thumbnails)] or [Thumbnails()]
        others = [one for one in start.session.attachments if not isinstance(one, Thumbnails)]
        pictures = [kept[0].limited(options.thumbnails)] if options.thumbnails else []
        start.session.attachments = [*others, *pictures]
        clock = start.session.clock
        ending = Ending(live.for_s, live.until, clock.stream_time_s, live=isinstance(video, LiveSource))

        def stop() -> bool:
            return should_stop() or ending.reached(start.session.clock.stream_time_s)

        if isinstance(video, LiveSource):
            yield from LiveRun(start, video, writer, ending, timings).watch(options.every or LIVE, stop)
        else:
            run = Run(start, video, writer, options.chunk, timings)
            yield from run.watch(options.every or MINUTELY, stop)


def _open_source(source: AnySource, options: IngestOptions, held: ExitStack) -> Source | LiveSource:
    """Open the source, unless it is open already, and cut out the part that is wanted."""
    video: Source | LiveSource
    if isinstance(source, str | os.PathLike):
        pixels = options.max_frame_pixels
        video = open_input(source, options.live, pixels) or open_source(source, options.decoder, max_pixels=pixels)
        held.enter_context(video)
    else:
        video = source
    if isinstance(video, LiveSource):
        if options.is_part:
            raise ConfigError(f"{video.info.name} is live, and parts are of files", hint="use --for or --until")
        if options.chunk > 1:
            raise ConfigError(f"{video.info.name} is live, and a chunk is for files", hint="leave --chunk out")
        return video
    return Part(video, options.start_s, options.duration_s) if options.is_part else video


def find_words(source: AnySource, video: Source | LiveSource, options: IngestOptions) -> Words | None:
    """Read the subtitles that are meant; `video` is the source, or the part, open."""
    place = source if isinstance(source, str | os.PathLike) else None
    return words_of(video, place, options.subtitles, options.start_s)


def _start(
    path: StatePath,
    video: Source | LiveSource,
    words: Words | None,
    options: IngestOptions,
    timings: Timings | None,
) -> Start:
    """Start a session, or continue the one of the state at `path`."""
    state = None if options.overwrite else existing_state(path)
    if state is None:
        if options.resume and not options.overwrite:
            raise StateNotFound(f"there is no state at {path} to continue", hint="start one: the same without --resume")
        with stage(timings, "model"):
            model = options.prompted(_load(None, options))
        with stage(timings, "state"):
            session = Session.start(model, options.config_with(words), fps=options.fps, attachments=[Transcript()])
            return Start(session, Segment(), {}, words)
    segment = find_segment(path, state, video, append=options.append)
    if isinstance(video, LiveSource):
        record = (state.source or {}) if segment.first_step < state.clock.steps else {}
    else:
        record = record_of(state, video.info.fingerprint)
    check_subtitles(path, record, words)
    check_memory(path, state, options.config)
    check_chunk(path, state, options.chunk)
    check_system(path, state, options.system)
    with stage(timings, "model"):
        model = _load(state, options)
    check_sampling(path, state, model, options.fps)
    with stage(timings, "state"):
        session = from_state(state, model)
    if isinstance(video, LiveSource):
        video.continues(record, state.clock.stream_time_s)
        return Start(session, segment, record, words)
    return Start(session, segment, record, words)


def _load(state: State | None, options: IngestOptions) -> Backbone:
    wanted = options.backbone
    if isinstance(wanted, Backbone):
        return wanted
    if state is None:
        return load_backbone(**options.new_model, **options.frames)
    return load_backbone_of(state, wanted, **options.placement, **options.frames)
