"""Streaming a video source through a session into a snapshot, with commits on the way.

Joins a source, a session and a path: reads steps, watches them, commits every so often, and stops cleanly when asked
to. Yields what happened as events and prints nothing. Resuming starts at the time where the last commit stands, so
an interrupted run and its continuation end in the bytes of one uninterrupted run. A source that is watched behind
others has their end as its beginning.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

from protokv import snapshot
from protokv.duration import parse_duration
from protokv.errors import ConfigError, SourceUnreadable
from protokv.persist import to_state
from protokv.session import Session
from protokv.snapshot import StatePath
from protokv.snapshot.sources import Segment
from protokv.snapshot.writer import Committed, Writer
from protokv.video import Source, read_steps


@dataclass(frozen=True, slots=True)
class Every:
    """How often to commit: after so much stream time, or after so many steps."""

    seconds: float | None = None
    n_steps: int | None = None

    @classmethod
    def parse(cls, text: str) -> Every:
        """`30s`, `2m`, `1h` of stream time, or `500steps`.

        Raises:
            ConfigError: it is none of these, or not above zero.
        """
        try:
            if text.endswith("steps"):
                every = cls(n_steps=int(text.removesuffix("steps")))
            else:
                every = cls(seconds=parse_duration(text))
        except (ValueError, ConfigError):
            every = cls()
        if not (every.seconds or every.n_steps or 0) > 0:
            raise ConfigError(f"cannot commit every {text!r}", hint="use for example 30s, 2m or 500steps")
        return every

    def due(self, n_steps: int, seconds: float) -> bool:
        """Whether to commit, so much after the last commit."""
        return n_steps >= (self.n_steps or float("inf")) or seconds >= (self.seconds or float("inf"))


@dataclass(frozen=True, slots=True)
class Progress:
    """After every step: where the stream stands, how fast it goes, and how large the state is."""

    steps: int
    stream_time_s: float
    duration_s: float | None
    frames_per_second: float
    state_bytes: int


@dataclass(frozen=True, slots=True)
class Commit:
    """The state at this step is on disk."""

    state: str
    steps: int
    stream_time_s: float
    file_bytes: int


@dataclass(frozen=True, slots=True)
class Summary:
    """How the run ended.

    Attributes:
        complete: the source was read to its end.
        damaged: something of the source could not be read; `damage` says what, where and why.
    """

    state: str
    steps: int
    stream_time_s: float
    tokens_seen: int
    state_bytes: int
    file_bytes: int
    elapsed_s: float
    complete: bool
    damaged: bool
    damage: str


def ingest(
    session: Session,
    source: Source,
    to: StatePath | Writer,
    *,
    every: Every | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    segment: Segment | None = None,
) -> Iterator[Progress | Commit | Summary]:
    """Watch the rest of a source and commit the session at the end, and on the way if `every` says so.

    Whatever ends the run, what was watched is committed before the `Summary`: a damaged file, a request to stop. Where
    the device allows it commits on the way are written while the stream goes on (`protokv.snapshot.writer`); the
    `Commit` comes when the state is on disk, and an error at the step after which it is known. The last commit is
    waited for.

    Args:
        session: what watches; it stands where the source has to be read on.
        source: what is watched.
        to: where the state goes; a `Writer` that is entered already keeps the path locked from before the state was
            read until after the run, a path is locked for the run.
        every: how often to commit on the way.
        should_stop: asked after every step.
        segment: where in the stream the source begins, as `open_session` says; at its beginning where None.

    Raises:
        SourceUnreadable: not one frame could be read.
        StateLocked: somebody else is writing the state.
        StateError: the state cannot be written.
    """
    segment = segment or Segment()
    with nullcontext(to) if isinstance(to, Writer) else Writer(to) as writer:
        yield from _ingest(session, source, writer, every, should_stop, segment)


def _ingest(
    session: Session,
    source: Source,
    writer: Writer,
    every: Every | None,
    should_stop: Callable[[], bool],
    segment: Segment,
) -> Iterator[Progress | Commit | Summary]:
    per_step = session.backbone.frames_per_step
    fps, first = session.clock.fps, session.clock.steps
    record = segment.record(source.info.to_dict())
    # Damage is told of what is read, and a source that is done is not read.
    damaged, damage = False, ""
    began, committed = time.perf_counter(), session.clock
    stopped = should_stop()
    for step in () if stopped or segment.done else read_steps(source, fps, per_step, first - segment.first_step):
        session.watch(step.images, segment.start_s + step.time_s)
        clock = session.clock
        yield Progress(
            steps=clock.steps,
            stream_time_s=clock.stream_time_s,
            duration_s=source.info.duration_s and segment.start_s + source.info.duration_s,
            frames_per_second=(clock.steps - first) * per_step / (time.perf_counter() - began),
            state_bytes=sum(session.memory.nbytes().values()),
        )
        yield from _events(writer, writer.landed())
        stopped = should_stop()
        if stopped:
            break
        if every and every.due(clock.steps - committed.steps, clock.stream_time_s - committed.stream_time_s):
            committed = clock
            yield from _events(writer, writer.commit(to_state(session, source=record)))
    if session.clock.steps == segment.first_step and not stopped:
        raise SourceUnreadable(
            f"no frame of {source.info.name} can be read", hint="check that the file is a video and is whole"
        )
    if not segment.done:
        last = to_state(session, source=record, complete=not stopped)
        yield from _events(writer, writer.commit(last, wait=True))
        damaged, damage = not source.damage.ok, source.damage.message
    yield Summary(
        state=str(writer.path),
        steps=session.clock.steps,
        stream_time_s=session.clock.stream_time_s,
        tokens_seen=session.clock.tokens_seen,
        state_bytes=sum(session.memory.nbytes().values()),
        file_bytes=snapshot.stored_bytes(writer.path),
        elapsed_s=time.perf_counter() - began,
        complete=not stopped or segment.done,
        damaged=damaged,
        damage=damage,
    )


def _events(writer: Writer, landed: list[Committed]) -> Iterator[Commit]:
    for one in landed:
        yield Commit(str(writer.path), one.steps, one.stream_time_s, one.file_bytes)
