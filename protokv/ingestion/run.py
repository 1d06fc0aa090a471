"""`ingest`: a source through a session into a state, with commits on the way.

Owns the order of things: open the source, lock the state, start a session or continue the saved one, watch, commit.
Resuming starts at the time where the last commit stands. A source that is watched behind others begins at their end.
Yields what happens as events, prints nothing, and knows no command line.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from protokv.backbones import EMBEDDED, load_backbone
from protokv.backbones.base import Backbone
from protokv.checkpoint import from_state, load_backbone_of, recorded_dtype, to_state
from protokv.config import DurableConfig, MemoryConfig
from protokv.errors import ConfigError, SourceError, SourceUnreadable, StateError, StateNotFound
from protokv.ingestion.continuation import check_memory, check_sampling, existing_state, find_segment
from protokv.ingestion.events import Commit, Event, Progress, Started, Summary
from protokv.ingestion.every import MINUTELY, Every
from protokv.ingestion.growth import Growth, fingerprint_of
from protokv.session import Session
from protokv.snapshot import DEFAULT_SUFFIX, State, StatePath, check_target, stored_bytes
from protokv.snapshot.sources import Segment
from protokv.snapshot.writer import Committed, Writer
from protokv.video import Damage, Decoder, Source, open_source, read_steps
from protokv.watched import end_of


def ingest(
    source: str | os.PathLike[str] | Source,
    target: StatePath | None = None,
    config: MemoryConfig | None = None,
    *,
    backbone: Backbone | str | None = None,
    fps: float | None = None,
    every: Every = MINUTELY,
    keep: int | None = None,
    append: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    decoder: Decoder = "auto",
    max_frame_pixels: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    device: str = "auto",
    dtype: str | None = None,
    device_map: str | None = None,
    quantization: str | None = None,
    background: bool | None = None,
) -> Generator[Event, None, None]:
    """Watch a source, or what is left of it, and keep the state on disk.

    A state that is at `target` already is continued. Whatever ends the run (a damaged source, a request to stop, an
    error, the caller who closes this iterator), the steps that were watched are committed first. Nothing is done
    before the first event is asked for.

    Args:
        source: a path, or an open source, which is left open.
        target: where the state goes; the name of the source with `.safetensors`, in the current folder, where None.
        config: the memory; `durable` with its default budget where None.
        backbone: the model, loaded already, so that one process can ingest many sources; or its name or folder; where
            None the one that the state names (`load_backbone_of`), or the embedded model.
        fps: sampled frames per second; the model's default where None.
        every: how often to commit on the way.
        keep: how many commits to keep, the last one included; None: none but the last.
        append: watch the source behind what a finished state has watched; start a state where there is none.
        resume: a missing state is an error.
        overwrite: an existing state is not looked at; the first commit replaces it.
        decoder: of a file, which is read in a process of its own; see `open_source`.
        max_frame_pixels: the most that a frame of a file may have; 8K where None.
        should_stop: asked after every step, and while waiting for a frame.
        device: where the model is loaded; this and the next three as for `load_backbone`.
        dtype: of its weights; that of the state, or `auto`, where None.
        device_map: spread it over several devices instead.
        quantization: of its weights; that of the state where None.
        background: write commits on the way in a thread, while the stream goes on; where None, if tensors are on a
            CUDA device. Their `Commit` comes once they are on disk, at the latest at the next one.

    Yields:
        One `Started`, a `Progress` after every step, a `Commit` for every state on disk, and last a `Summary`.

    Raises:
        ConfigError: a setting makes no sense, or two contradict each other.
        SourceError: the source is not there, or not one frame of it can be read.
        StateError: the state is locked, does not fit, is corrupt or cannot be written.
        ModelError: the model cannot be loaded.
    """
    if append and overwrite:
        raise ConfigError("cannot append to a state and start it over", hint="leave one of the two out")
    path = default_target(source) if target is None else target
    placement = {"device": device, "dtype": dtype, "device_map": device_map, "quantization": quantization}
    with ExitStack() as held:
        if isinstance(source, str | os.PathLike):
            video: Source = held.enter_context(open_source(source, decoder, max_pixels=max_frame_pixels, isolate=True))
        else:
            video = source
        check_target(path)
        # Locked before the state is read, so that nobody else writes between this and the first commit.
        writer = held.enter_context(Writer(path, keep=keep, background=background))
        growth = Growth(video, None if video is source else cast("str | os.PathLike[str]", source))
        session, segment, record = _open(
            video, growth, path, config or DurableConfig(), backbone, placement, fps, append, resume, overwrite
        )
        yield from _Run(session, video, growth, writer, segment, record).watch(every, should_stop)


def default_target(source: str | os.PathLike[str] | Source) -> str:
    """Where the state of a source goes that is not told: its name with the default suffix, in the current folder."""
    name = os.fspath(source) if isinstance(source, str | os.PathLike) else source.info.name
    return Path(name).stem + DEFAULT_SUFFIX


def _open(
    video: Source,
    growth: Growth,
    path: StatePath,
    config: MemoryConfig,
    backbone: Backbone | str | None,
    placement: dict[str, Any],
    fps: float | None,
    append: bool,
    resume: bool,
    overwrite: bool,
) -> tuple[Session, Segment, Mapping[str, Any]]:
    """The session that stands where the source is read on, where that is, and what is known of the source."""
    state = None if overwrite else existing_state(path)
    if state is None:
        if resume and not overwrite:
            raise StateNotFound(f"there is no state at {path} to continue", hint="start one: the same without --resume")
        return Session.start(_load(backbone, None, placement), config, fps=fps), Segment(), {}
    segment = find_segment(path, state, video, growth, append=append)
    check_memory(path, state, config)
    model = _load(backbone, state, placement)
    check_sampling(path, state, model, fps)
    return from_state(state, model), segment, record_of(state, video.info.fingerprint, growth)


def _load(wanted: Backbone | str | None, state: State | None, placement: dict[str, Any]) -> Backbone:
    if isinstance(wanted, Backbone):
        return wanted
    if state is None:
        return load_backbone(wanted or EMBEDDED, **placement | {"dtype": placement["dtype"] or "auto"})
    if wanted is None:
        return load_backbone_of(state, **placement)
    return load_backbone(wanted, **placement | {"dtype": placement["dtype"] or recorded_dtype(state)})


def record_of(state: State, fingerprint: str | None, growth: Growth) -> Mapping[str, Any]:
    """What a state says of the source with this fingerprint, or of what it has grown from; empty if nothing."""
    last = state.source or {}
    if growth.has_grown_from(last):
        return last
    records = (last, *last.get("earlier", ()))
    return next((one for one in records if fingerprint and fingerprint_of(one) == fingerprint), {})


def _frames_by_decoder(said: object) -> Counter[str]:
    """How many of the watched frames each decoder gave, as a state says it; none where that makes no sense."""
    pairs = said.items() if isinstance(said, dict) else ()
    return Counter({name: n for name, n in pairs if isinstance(name, str) and type(n) is int and n >= 0})


class _Run:
    """One run over one source: what is watched, what is committed, what is damaged."""

    def __init__(
        self,
        session: Session,
        source: Source,
        growth: Growth,
        writer: Writer,
        segment: Segment,
        record: Mapping[str, Any],
    ) -> None:
        self._session, self._source, self._writer, self._segment = session, source, writer, segment
        self._growth, self._record, self._grows = growth, record, False
        self._damage = Damage.from_dict(record.get("damage"))
        self._decoders = _frames_by_decoder(record.get("decoders"))
        mark = record.get("mark")
        self._mark = mark if type(mark) is int else None
        self._first = self._committed = session.clock
        self._began = self._committed_at = time.perf_counter()
        self._complete = segment.done
        self._bytes: int | None = None

    def watch(self, every: Every, should_stop: Callable[[], bool]) -> Iterator[Event]:
        """Read to the end of the source, or until asked to stop."""
        yield self._started()
        if not self._segment.done:
            try:
                yield from self._steps(every, should_stop)
            except BaseException as error:
                # Not after an error within a step, which leaves a memory that is neither before nor behind it, and not
                # where writing is what fails.
                if self._session.intact and self._unsaved and not isinstance(error, StateError):
                    with suppress(Exception):
                        self._commit(wait=True)
                        clock = self._session.clock
                        error.add_note(f"{self._writer.path} holds what was watched until {clock.stream_time_s:g} s")
                raise
            yield from self._commit(wait=True)
        yield self._summary()

    def _steps(self, every: Every, should_stop: Callable[[], bool]) -> Iterator[Event]:
        session, segment, stopped = self._session, self._segment, False

        def asked() -> bool:
            nonlocal stopped
            stopped = stopped or should_stop()
            return stopped

        if asked():
            return
        steps = read_steps(
            self._source,
            session.clock.fps,
            session.backbone.frames_per_step,
            self._first.steps - segment.first_step,
            # Frames behind a damaged place are the same only if the decoder comes from the same place.
            from_beginning=not self._damage.ok,
            mark=self._mark,
            should_stop=asked,
        )
        while not stopped:
            try:
                step = next(steps, None)
            except SourceError as error:
                if session.clock.steps == segment.first_step:
                    raise
                # What was watched of it is a state, if an incomplete one.
                lost = max(1, self._damage.frames_lost)
                self._damage = replace(self._damage, frames_lost=lost, message=error.message)
                return
            if step is None:
                self._grows = not stopped and self._growth.grows()
                self._damage, self._complete = self._source.damage, not stopped and not self._grows
                break
            session.watch(step.images, segment.start_s + step.time_s)
            self._damage = step.damage
            self._decoders.update(step.decoders)
            self._mark = step.mark
            yield self._progress()
            yield from self._events(self._writer.landed())
            if not asked() and self._due(every):
                yield from self._commit()
        if session.clock.steps == segment.first_step and not stopped:
            raise SourceUnreadable(
                f"no frame of {self._source.info.name} can be read", hint="check that the file is a video and is whole"
            )

    @property
    def _unsaved(self) -> bool:
        return self._session.clock.steps > self._committed.steps

    def _due(self, every: Every) -> bool:
        clock, then = self._session.clock, self._committed
        wall_s = time.perf_counter() - self._committed_at
        return every.due(clock.steps - then.steps, clock.stream_time_s - then.stream_time_s, wall_s)

    def _commit(self, *, wait: bool = False) -> list[Commit]:
        self._committed, self._committed_at = self._session.clock, time.perf_counter()
        record = {
            **self._source.info.to_dict(),
            **self._growth.record(self._record),
            "decoders": dict(sorted(self._decoders.items())),
            "mark": self._mark,
            "damage": None if self._damage.ok else self._damage.to_dict(),
        }
        state = to_state(self._session, source=self._segment.record(record), complete=self._complete)
        return self._events(self._writer.commit(state, wait=wait))

    def _events(self, landed: list[Committed]) -> list[Commit]:
        if landed:
            self._bytes = landed[-1].file_bytes
        return [Commit(str(self._writer.path), one.steps, one.stream_time_s, one.file_bytes) for one in landed]

    def _started(self) -> Started:
        clock, segment = self._session.clock, self._segment
        if segment.done:
            how = "finished"
        elif clock.steps > segment.first_step:
            how = "continued"
        else:
            how = "appended" if clock.steps else "started"
        return Started(
            state=str(self._writer.path),
            source=self._source.info.name,
            how=how,  # type: ignore[arg-type]
            steps=clock.steps,
            stream_time_s=clock.stream_time_s,
            locked=self._writer.locked,
        )

    def _progress(self) -> Progress:
        clock, duration_s = self._session.clock, self._source.info.duration_s
        frames = (clock.steps - self._first.steps) * clock.frames_per_step
        return Progress(
            steps=clock.steps,
            stream_time_s=clock.stream_time_s,
            duration_s=duration_s and self._segment.start_s + duration_s,
            frames_per_second=frames / (time.perf_counter() - self._began),
            state_bytes=self._state_bytes(),
        )

    def _summary(self) -> Summary:
        clock = self._session.clock
        return Summary(
            state=str(self._writer.path),
            steps=clock.steps,
            stream_time_s=clock.stream_time_s,
            watched_s=self._watched_s(),
            tokens_seen=clock.tokens_seen,
            state_bytes=self._state_bytes(),
            # Not asked of the disk where it was just written: it may have been moved away since.
            file_bytes=stored_bytes(self._writer.path) if self._bytes is None else self._bytes,
            elapsed_s=time.perf_counter() - self._began,
            complete=self._complete,
            grows=self._grows,
            damaged=not self._damage.ok,
            damage=self._damage.message,
        )

    def _watched_s(self) -> float:
        reached_s = self._session.clock.stream_time_s
        if not self._complete:
            return reached_s
        return end_of(reached_s, self._segment.start_s, self._source.info.duration_s, self._session.clock)

    def _state_bytes(self) -> int:
        return sum(self._session.memory.nbytes().values())
