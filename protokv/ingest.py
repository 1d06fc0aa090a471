"""Streaming a video source through a session into a snapshot, with commits on the way.

Joins a source, a session and a path: reads steps, watches them, commits every so often, and stops cleanly when asked
to. Yields what happened as events and prints nothing. Resuming starts at the time where the last commit stands, so
an interrupted run and its continuation end in the bytes of one uninterrupted run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from protokv.errors import ConfigError, SourceUnreadable
from protokv.persist import save
from protokv.session import Session
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
        units = {"s": 1.0, "m": 60.0, "h": 3600.0}
        try:
            if text.endswith("steps"):
                every = cls(n_steps=int(text.removesuffix("steps")))
            else:
                every = cls(seconds=float(text[:-1]) * units[text[-1:]])
        except (ValueError, KeyError):
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
    path: str | Path,
    *,
    every: Every | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[Progress | Commit | Summary]:
    """Watch the rest of a source and commit the session to `path` at the end, and on the way if `every` says so.

    Whatever ends the run, what was watched is committed before the `Summary`: a damaged file, a request to stop.

    Raises:
        SourceUnreadable: not one frame could be read.
        StateError: the state cannot be written.
    """
    per_step = session.backbone.frames_per_step
    fps, first = session.clock.fps, session.clock.steps
    began, committed = time.perf_counter(), session.clock
    stopped = should_stop()
    for step in () if stopped else read_steps(source, fps, per_step, first):
        session.watch(step.images, step.time_s)
        clock = session.clock
        yield Progress(
            steps=clock.steps,
            stream_time_s=clock.stream_time_s,
            duration_s=source.info.duration_s,
            frames_per_second=(clock.steps - first) * per_step / (time.perf_counter() - began),
            state_bytes=sum(session.memory.nbytes().values()),
        )
        stopped = should_stop()
        if stopped:
            break
        if every and every.due(clock.steps - committed.steps, clock.stream_time_s - committed.stream_time_s):
            committed = clock
            yield _commit(session, source, path, complete=False)
    if not session.clock.steps and not stopped:
        raise SourceUnreadable(
            f"no frame of {source.info.name} can be read", hint="check that the file is a video and is whole"
        )
    last = _commit(session, source, path, complete=not stopped)
    yield last
    damage = source.damage
    yield Summary(
        state=last.state,
        steps=last.steps,
        stream_time_s=last.stream_time_s,
        tokens_seen=session.clock.tokens_seen,
        state_bytes=sum(session.memory.nbytes().values()),
        file_bytes=last.file_bytes,
        elapsed_s=time.perf_counter() - began,
        complete=not stopped,
        damaged=not damage.ok,
        damage=damage.message,
    )


def _commit(session: Session, source: Source, path: str | Path, *, complete: bool) -> Commit:
    size = save(session, path, source=source.info.to_dict(), complete=complete)
    return Commit(str(path), session.clock.steps, session.clock.stream_time_s, size)
