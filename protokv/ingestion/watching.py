"""One run over one source: prefetch its steps, watch them, commit the state, and give the events.

`Run` reads a source to its end, `LiveRun` a live one. Owns the order of these, and saves the watched steps whatever
ends the run. The caller makes the session; the writer writes states.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, cast

from protokv.core.session import Session
from protokv.errors import ConfigError, SourceError, SourceUnreadable, StateError
from protokv.ingestion.estimate import end_bytes, most_bytes
from protokv.ingestion.events import Commit, Event, Progress, SourceLost, Started, Summary, WordsLost
from protokv.ingestion.live.source import LiveSource
from protokv.ingestion.options import Ending, Every
from protokv.ingestion.prefetch import DEPTH, ReadyStep, Stop, prefetch
from protokv.state.api import stored_bytes
from protokv.state.checkpoint import to_state
from protokv.state.thumbnails import Picture, Thumbnails, shrink
from protokv.state.watched import Segment, end_of, frames_by_decoder
from protokv.state.writer import Committed, Writer
from protokv.timings import Timings, stage
from protokv.video import Damage, Source, read_steps
from protokv.video.sampling import Step
from protokv.words import Track, Words, speak
from protokv.words.find import named, recorded
from protokv.words.transcript import check_words

_END = object()


@dataclass(frozen=True)
class Start:
    """The beginning of a run: a session, the part of the stream that its source fills, and the state's record of it.

    `words` are those that are said in the source, in its own time.
    """

    session: Session
    segment: Segment
    record: Mapping[str, Any]
    words: Words | None = None


class Run:
    """One run over one source: watches steps, commits states, and adds up damage."""

    def __init__(
        self,
        start: Start,
        source: Source,
        writer: Writer,
        chunk: int = 1,
        timings: Timings | None = None,
    ) -> None:
        session, segment, record = start.session, start.segment, start.record
        self._session, self._source, self._writer, self._segment = session, source, writer, segment
        self._chunk, self._timings, session.timings = chunk, timings, timings
        self._thumbnails = next((one for one in session.attachments if isinstance(one, Thumbnails)), None)
        self._words, self._told_words = start.words, False
        if speak(self._words):
            check_words(session.backbone, session.config)
        if self._words is not None and (lost := recorded(record).get("lost")):
            self._words.lost = str(lost)
        self._damage = Damage.from_dict(record.get("damage"))
        self._decoders = Counter(frames_by_decoder(record.get("decoders")))
        mark = record.get("mark")
        self._mark = mark if type(mark) is int else None
        self._first = self._committed = session.clock
        self._began = self._committed_at = time.perf_counter()
        self._complete = segment.done
        self._bytes: int | None = None

    def watch(self, every: Every, should_stop: Callable[[], bool]) -> Iterator[Event]:
        """Read to the end of the source, or until asked to stop."""
        yield self._started()
        yield from self._lost_words()
        if not self._segment.done:
            try:
                yield from self._steps(every, should_stop)
            except BaseException as error:
                # Not after an error within a step, which leaves half a step in the memory, and not if writing failed.
                if self._session.intact and self._unsaved and not isinstance(error, StateError):
                    with suppress(Exception):
                        self._commit(wait=True)
                        clock = self._session.clock
                        error.add_note(f"{self._writer.path} holds what was watched until {clock.stream_time_s:g} s")
                raise
            yield from self._commit(wait=True)
        yield self._summary()

    def _steps(self, every: Every, should_stop: Callable[[], bool]) -> Iterator[Event]:
        session, segment, stop = self._session, self._segment, Stop(should_stop)
        if stop.ask():
            return
        depth = max(DEPTH, self._chunk)
        ready = prefetch(
            self._open_steps,
            session.backbone,
            stop,
            depth=depth,
            shrink=shrink if self._thumbnails else None,
            timings=self._timings,
        )
        with closing(ready) as reading:
            while not stop.decided:
                steps, error = _next_steps(reading, self._chunk)
                if stop.decided and len(steps) < self._chunk:
                    # The next run begins this chunk again.
                    break
                if steps:
                    yield from self._take(steps)
                    if not stop.ask() and self._due(every):
                        yield from self._commit()
                if error is not None:
                    if session.clock.steps == segment.first_step:
                        raise error
                    # The steps watched so far are a state, although an incomplete one.
                    lost = max(1, self._damage.frames_lost)
                    self._damage = replace(self._damage, frames_lost=lost, message=error.message)
                    return
                if len(steps) < self._chunk:
                    self._damage, self._complete = self._source.damage, not stop.decided
                    break
        if session.clock.steps == segment.first_step and not stop.decided:
            raise SourceUnreadable(
                f"no frame of {self._source.info.name} can be read", hint="check that the file is a video and is whole"
            )

    def _open_steps(self, unwanted: Callable[[], bool]) -> Iterator[Step]:
        return read_steps(
            self._source,
            self._first.fps,
            self._first.frames_per_step,
            self._first.steps - self._segment.first_step,
            # Frames after a damaged place are the same only if the decoder begins at the same place.
            from_beginning=not self._damage.ok,
            mark=self._mark,
            should_stop=unwanted,
        )

    def _take(self, steps: list[ReadyStep]) -> Iterator[Event]:
        starts_s = [self._segment.start_s + step.time_s for step in steps]
        first = self._session.clock.steps
        words = [self._said(step.time_s) for step in steps]
        self._session.watch_prepared([step.prepared for step in steps], starts_s, words)
        for i, (step, start_s) in enumerate(zip(steps, starts_s, strict=True)):
            self._note(first + i, start_s, step.thumbnail, step.decoders)
        self._damage, self._mark = steps[-1].damage, steps[-1].mark
        yield self._progress()
        yield from self._lost_words()
        yield from self._events(self._writer.landed())

    def _said(self, time_s: float) -> list[str]:
        """Return what is said in the step at a time of the source."""
        return [] if self._words is None else self._words.between(time_s, time_s + self._first.step_seconds)

    def _note(self, index: int, start_s: float, thumbnail: Picture | None, decoders: Sequence[str]) -> None:
        """Keep what a watched step showed, before anything is yielded: the caller may end the run there."""
        if self._thumbnails is not None and thumbnail is not None:
            self._thumbnails.add(index, start_s, thumbnail)
        self._decoders.update(decoders)

    def _lost_words(self) -> Iterator[WordsLost]:
        """Tell once that words are lost."""
        if self._words_lost and not self._told_words:
            self._told_words = True
            yield WordsLost(self._named_words or "", self._words_lost)

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
            **self._described(),
            "decoders": dict(sorted(self._decoders.items())),
            "mark": self._mark,
            "damage": None if self._damage.ok else self._damage.to_dict(),
        }
        if self._chunk > 1:
            record["chunk"] = self._chunk
        if self._words is not None and self._words.record:
            record["words"] = {**self._words.record, **({"lost": self._words_lost} if self._words_lost else {})}
        with stage(self._timings, "commit"):
            state = to_state(self._session, source=self._segment.record(record), complete=self._complete)
            return self._events(self._writer.commit(state, wait=wait))

    def _described(self) -> dict[str, Any]:
        """Return the record of the source itself in a state."""
        return self._source.info.to_dict()

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
            fps=clock.fps,
            source_fps=self._source.info.rate_fps,
            state_bytes=self._session.memory.bytes_held,
            most_bytes=most_bytes(
                self._session.memory,
                0 if self._thumbnails is None else self._thumbnails.most,
                words=speak(self._words),
            ),
            notice=self._session.backbone.notice,
            model=self._session.backbone.identity.name,
            dtype=self._session.backbone.identity.dtype,
            words=self._named_words,
        )

    def _progress(self) -> Progress:
        clock, duration_s = self._session.clock, self._source.info.duration_s
        frames = (clock.steps - self._first.steps) * clock.frames_per_step
        return Progress(
            steps=clock.steps,
            stream_time_s=clock.stream_time_s,
            duration_s=duration_s and self._segment.start_s + duration_s,
            frames_per_second=frames / (time.perf_counter() - self._began),
            state_bytes=self._session.memory.bytes_held,
            end_bytes=self._end_bytes(),
        )

    def _end_bytes(self) -> int | None:
        """Return about what the state takes on disk at the end, if its steps go on as until now."""
        clock, duration_s = self._session.clock, self._source.info.duration_s
        if not duration_s:
            return None
        share = max(1.0, (self._segment.start_s + duration_s) / clock.stream_time_s)
        kept = self._thumbnails
        pictures = 0 if kept is None else kept.expected_bytes(round(clock.steps * share))
        session = self._session
        return end_bytes(session.memory, session.backbone, round(clock.tokens_seen * share), pictures)

    def _summary(self) -> Summary:
        clock = self._session.clock
        return Summary(
            state=str(self._writer.path),
            steps=clock.steps,
            stream_time_s=clock.stream_time_s,
            watched_s=self._watched_s(),
            tokens_seen=clock.tokens_seen,
            state_bytes=self._session.memory.bytes_held,
            # A state that was just written may have been moved away since: do not ask the disk.
            file_bytes=stored_bytes(self._writer.path) if self._bytes is None else self._bytes,
            elapsed_s=time.perf_counter() - self._began,
            complete=self._complete,
            damaged=not self._damage.ok,
            damage=self._damage.message,
            words_lost=self._words_lost,
        )

    @property
    def _words_lost(self) -> str:
        return (self._words.lost if self._words is not None else None) or ""

    @property
    def _named_words(self) -> str | None:
        return named(self._words.record) if self._words is not None else None

    def _watched_s(self) -> float:
        reached_s = self._session.clock.stream_time_s
        if not self._complete:
            return reached_s
        return end_of(reached_s, self._segment.start_s, self._source.info.duration_s, self._session.clock)


def _next_steps(reading: Iterator[ReadyStep], n: int) -> tuple[list[ReadyStep], SourceError | None]:
    """Return the next `n` steps of a source, or fewer at its end or before an error, and the error."""
    steps: list[ReadyStep] = []
    try:
        steps.extend(islice(reading, n))
    except SourceError as error:
        return steps, error
    return steps, None


class LiveRun(Run):
    """A `Run` over a live source. It waits for frames and goes on after a loss, with an event for each loss.

    `ending` says when it is over. The thread that reads the source gives the steps, so nothing else prefetches.
    """

    def __init__(
        self,
        start: Start,
        source: LiveSource,
        writer: Writer,
        ending: Ending,
        timings: Timings | None = None,
    ) -> None:
        super().__init__(start, cast(Source, source), writer, timings=timings)
        self._live, self._ending = source, ending
        # The wall clock log holds the losses of earlier runs.
        self._damage = source.damage

    def _steps(self, every: Every, should_stop: Callable[[], bool]) -> Iterator[Event]:
        session, segment, stop = self._session, self._segment, Stop(should_stop)
        clock = self._first
        steps = self._live.steps(clock.fps, clock.frames_per_step, segment, clock.stream_time_s, stop.ask)
        while not stop.ask():
            try:
                step = next(steps, _END)
            except SourceError as error:
                if session.clock.steps == segment.first_step:
                    raise
                self._damage = replace(self._damage, frames_lost=1, message=error.message)
                return
            if step is _END:
                break
            if isinstance(step, Step):
                start_s = segment.start_s + step.time_s
                session.watch(step.images, start_s, self._said(step.time_s))
                thumbnail = None if self._thumbnails is None else shrink(step.images[0])
                self._note(session.clock.steps - 1, start_s, thumbnail, step.decoders)
                yield self._progress()
                yield from self._lost_words()
            elif step is not None:
                yield step  # type: ignore[misc]
            yield from self._events(self._writer.landed())
            if self._unsaved and not stop.decided and (isinstance(step, SourceLost) or self._due(every)):
                yield from self._commit()
        self._complete = self._ending.over or not stop.decided
        if self._complete and session.clock.steps == segment.first_step:
            raise SourceUnreadable(f"no frame of {self._live.info.name} came", hint="look at the source")

    def _said(self, time_s: float) -> list[str]:
        said, session = super()._said(time_s), self._session
        if self._words is None or not speak(self._words):
            return said
        spoken = session.config.with_words(True)
        if session.clock.steps == 0 and session.config != spoken:
            # Its track shows only now. The memory has seen nothing yet: make it anew, with room for words.
            session.config, session.memory = spoken, Session.start(session.backbone, spoken).memory
        try:
            check_words(session.backbone, session.config)
        except ConfigError as error:
            self._words, said = Track((), self._words.record, error.message), []
        return said

    def _described(self) -> dict[str, Any]:
        return self._live.record(self._committed.stream_time_s)

    def _progress(self) -> Progress:
        return replace(super()._progress(), frames_dropped=self._live.log.frames_dropped)

    def _summary(self) -> Summary:
        log = self._live.log
        return replace(super()._summary(), frames_dropped=log.frames_dropped, gaps=log.gaps_in_all)
