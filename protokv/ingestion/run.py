"""`ingest`: a source through a session into a state, with commits on the way.

Owns what comes before the first step: the source is opened, the state locked, a session started or the saved one
continued. Resuming starts at the time where the last commit stands. A source that is watched behind others begins at
their end. Yields what happens as events, prints nothing, and knows no command line.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from protokv.backbones import EMBEDDED, load_backbone
from protokv.backbones.base import Backbone
from protokv.config import DurableConfig, MemoryConfig
from protokv.core.session import Session
from protokv.core.snapshot import State
from protokv.errors import ConfigError, StateNotFound
from protokv.ingestion.continuation import check_chunk, check_memory, check_sampling, existing_state, find_segment
from protokv.ingestion.events import Event
from protokv.ingestion.live.growing_file import GrowingFile, fingerprint_of
from protokv.ingestion.live.options import LiveOptions
from protokv.ingestion.live.run import LiveRun
from protokv.ingestion.live.source import LiveSource, open_input
from protokv.ingestion.schedule import LIVE, MINUTELY, Ending, Every
from protokv.ingestion.watching import Run
from protokv.storage.api import check_target
from protokv.storage.checkpoint import from_state, load_backbone_of
from protokv.storage.form import DEFAULT_SUFFIX, StatePath
from protokv.object_store import is_object
from protokv.storage.overwriting import check_not_read
from protokv.storage.watched import Segment, records_of
from protokv.storage.writer import Writer
from protokv.timings import Timings, stage
from protokv.video import Decoder, Source, open_source
from protokv.video import connection as address
from protokv.video.part import Part

# Of a chunk: a forward of thousands of tokens gains nothing more, and its attention grows with their square.
MOST_STEPS = 64


def ingest(
    source: str | os.PathLike[str] | Source | LiveSource,
    target: StatePath | None = None,
    config: MemoryConfig | None = None,
    *,
    backbone: Backbone | str | None = None,
    fps: float | None = None,
    every: Every | None = None,
    keep: int | None = None,
    append: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    start_s: float = 0.0,
    duration_s: float | None = None,
    decoder: Decoder = "auto",
    max_frame_pixels: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    device: str = "auto",
    dtype: str | None = None,
    device_map: str | None = None,
    quantization: str | None = None,
    revision: str | None = None,
    background: bool | None = None,
    chunk: int = 1,
    timings: Timings | None = None,
    live: LiveOptions | None = None,
) -> Generator[Event, None, None]:
    """Watch a source, or what is left of it, and keep the state on disk.

    A state that is at `target` already is continued. Whatever ends the run (a damaged source, a request to stop, an
    error, the caller who closes this iterator), the steps that were watched are committed first. Nothing is done
    before the first event is asked for.

    Args:
        source: a path, an address (`protokv.video.connection`), or an open source, which is left open.
        target: where the state goes; the name of the source with `.safetensors`, in the current folder, where None.
        config: the memory; `durable` with its default budget where None.
        backbone: the model, loaded already, so that one process can ingest many sources; or its name or folder; where
            None the one that the state names (`load_backbone_of`), or the embedded model.
        fps: sampled frames per second; the model's default where None.
        every: how often to commit on the way; where None once a minute, and every 5 seconds where the source is live.
        keep: how many commits to keep, the last one included; None: none but the last.
        append: watch the source behind what a finished state has watched; start a state where there is none.
        resume: a missing state is an error.
        overwrite: an existing state is not looked at; the first commit replaces it.
        start_s: where in the source to begin; what comes before is not watched, and stream time begins there.
        duration_s: how much of it to watch; to its end where None. A part is another source than the whole.
        decoder: of a file, which is read in a process of its own; see `open_source`.
        max_frame_pixels: the most that a frame of a file may have; 8K where None.
        should_stop: asked after every step or chunk, and while waiting for a frame.
        device: where the model is loaded; this and the next three as for `load_backbone`.
        dtype: of its weights; that of the state, or `auto`, where None.
        device_map: spread it over several devices instead.
        quantization: of its weights; that of the state where None.
        revision: branch, tag or commit of a hub model; that of the state, or its main branch, where None.
        background: write commits on the way in a thread, while the stream goes on; where None, if tensors are on a
            CUDA device. Their `Commit` comes once they are on disk, at the latest at the next one.
        chunk: steps that go through the model together; what each attends to is in `Session.watch_prepared`. Commits
            and `Progress` come behind whole chunks. 1 is the stream as it is; more is for files, faster, and another
            stream of states, which only the same chunk continues.
        timings: where to add up seconds by stage; None: nowhere.
        live: how a source is read that does not wait, or may be lost; and when to end. That of a `LiveSource` counts.

    Yields:
        One `Started`, a `Progress` after every step, a `Commit` for every state on disk, what happens to a live source,
        and last a `Summary`.

    Raises:
        ConfigError: a setting makes no sense, two contradict each other, or the state would go where the source is.
        SourceError: the source is not there, or not one frame of it can be read.
        StateError: the state is locked, does not fit, is corrupt or cannot be written.
        ModelError: the model cannot be loaded.
    """
    if not 1 <= chunk <= MOST_STEPS:
        raise ConfigError(f"a chunk of {chunk} steps makes no sense", hint=f"use 1 to {MOST_STEPS}")
    if append and overwrite:
        raise ConfigError("cannot append to a state and start it over", hint="leave one of the two out")
    path = default_target(source) if target is None else target
    check_not_read(path, source)
    placement = {
        "device": device,
        "dtype": dtype,
        "device_map": device_map,
        "quantization": quantization,
        "revision": revision,
    }
    with ExitStack() as held:
        options = source.options if isinstance(source, LiveSource) else live or LiveOptions()
        check_target(path)
        video: Source | LiveSource
        if isinstance(source, str | os.PathLike):
            opened = open_input(source, options, max_frame_pixels)
            if opened is None:
                opened = open_source(source, decoder, max_pixels=max_frame_pixels, isolate=True)
            held.enter_context(opened)
            video = opened
        else:
            video = source
        if start_s or duration_s is not None:
            if isinstance(video, LiveSource):
                raise ConfigError(f"{video.info.name} is live, and parts are of files", hint="use --for or --until")
            video = Part(video, start_s, duration_s)
        if isinstance(video, LiveSource) and chunk > 1:
            raise ConfigError(f"{video.info.name} is live, and a chunk is for files", hint="leave --chunk out")
        # Locked before the state is read, so that nobody else writes between this and the first commit.
        writer = held.enter_context(Writer(path, keep=keep, background=background))
        path_of_file = None if video is source or isinstance(video, Part) else cast("str | os.PathLike[str]", source)
        growth = GrowingFile(video, path_of_file, followed=options.follow)
        state = None if overwrite else existing_state(path)
        if state is None and resume and not overwrite:
            raise StateNotFound(f"there is no state at {path} to continue", hint="start one: the same without --resume")
        session, segment, record = _open(
            state, video, growth, path, config or DurableConfig(), backbone, placement, fps, append, chunk, timings
        )
        ending = Ending(options.for_s, options.until, session.clock.stream_time_s, live=isinstance(video, LiveSource))

        def stop() -> bool:
            return should_stop() or ending.reached(session.clock.stream_time_s)

        if isinstance(video, LiveSource):
            yield from LiveRun(session, video, growth, writer, segment, record, ending, timings).watch(
                every or LIVE, stop
            )
            return
        if options.follow:
            segment = replace(segment, done=False)
        run = Run(session, video, growth, writer, segment, record, chunk, timings)
        yield from run.watch(every or MINUTELY, stop)


def default_target(source: str | os.PathLike[str] | Source | LiveSource) -> str:
    """Where the state of a source goes that is not told: its name with the default suffix, in the current folder."""
    name = os.fspath(source) if isinstance(source, str | os.PathLike) else source.info.name
    # Of an object's address, what stands behind its last slash.
    return (Path(name).stem if is_object(name) else address.stem(name)) + DEFAULT_SUFFIX


def _open(
    state: State | None,
    video: Source | LiveSource,
    growth: GrowingFile,
    path: StatePath,
    config: MemoryConfig,
    backbone: Backbone | str | None,
    placement: dict[str, Any],
    fps: float | None,
    append: bool,
    chunk: int,
    timings: Timings | None,
) -> tuple[Session, Segment, Mapping[str, Any]]:
    """The session that stands where the source is read on, where that is, and what is known of the source."""
    if state is None:
        with stage(timings, "model"):
            model = _load(backbone, None, placement)
        with stage(timings, "state"):
            return Session.start(model, config, fps=fps), Segment(), {}
    segment = find_segment(path, state, video, growth, append=append)
    check_memory(path, state, config)
    check_chunk(path, state, chunk)
    with stage(timings, "model"):
        model = _load(backbone, state, placement)
    check_sampling(path, state, model, fps)
    with stage(timings, "state"):
        session = from_state(state, model)
    if isinstance(video, LiveSource):
        record = (state.source or {}) if segment.first_step < state.clock.steps else {}
        video.continues(record, state.clock.stream_time_s)
        return session, segment, record
    return session, segment, record_of(state, video.info.fingerprint, growth)


def _load(wanted: Backbone | str | None, state: State | None, placement: dict[str, Any]) -> Backbone:
    if isinstance(wanted, Backbone):
        return wanted
    if state is None:
        return load_backbone(wanted or EMBEDDED, **placement | {"dtype": placement["dtype"] or "auto"})
    return load_backbone_of(state, wanted, **placement)


def record_of(state: State, fingerprint: str | None, growth: GrowingFile) -> Mapping[str, Any]:
    """What a state says of the source with this fingerprint, or of what it has grown from; empty if nothing."""
    last = state.source or {}
    if growth.has_grown_from(last):
        return last
    records = reversed(records_of(state))
    return next((one for one in records if fingerprint and fingerprint_of(one) == fingerprint), {})
