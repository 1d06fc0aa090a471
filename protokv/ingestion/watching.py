"""One run over one source: take its steps, watch them, commit the state, and give the events.

Owns the order of these, and saves the watched steps whatever ends the run. The caller makes the
session; the store writes states.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from typing import Literal

from protokv.errors import SourceError, SourceUnreadable, StateError
from protokv.ingestion import events
from protokv.ingestion.asking import StandingAsker
from protokv.ingestion.estimate import bound_state_bytes, count_prototypes, estimate_end_bytes
from protokv.ingestion.live import LiveSource
from protokv.ingestion.options import Every, IngestOptions
from protokv.ingestion.prefetch import (
    PREFETCH_DEPTH,
    STOP_POLL_S,
    PrefetchedStep,
    StopRequest,
    prefetch_steps,
    prepare_step,
)
from protokv.state.reader import StateReader
from protokv.state.sources import StandingAnswer, StreamSegment, clip_source_end
from protokv.state.store import StateStore
from protokv.state.thumbnails import Thumbnails, make_thumbnail
from protokv.stream.seeing import StepsToWatch
from protokv.stream.session import Session
from protokv.texts import JsonRecord
from protokv.timings import Timings, time_stage
from protokv.video import Source, SourceDamage, read_steps
from protokv.video.sampling import VideoStep
from protokv.video.source import ShouldStop
from protokv.words.cues import Subtitles
from protokv.words.find import name_subtitles, read_recorded_subtitles
from protokv.words.transcript import check_memory_takes_words


@dataclass(frozen=True)
class RunSetup:
    """The beginning of a run."""

    session: Session
    segment: StreamSegment  # the part of the stream that its source fills
    record: JsonRecord  # record of the source, in the state
    subtitles: Subtitles  # subtitles of the source, in its own time
    chunk: int  # steps that go through the model together
    answers: Sequence[StandingAnswer] = ()  # answers that the state keeps


RunItem = events.IngestEvent | StepsToWatch | None
"""What a run yields: an event, what it waits for, or None while its source gives nothing."""


class IngestRun:
    """One run over one source: watches steps, commits states, and adds up damage.

    A live source is waited for and goes on after a loss, with an event for each. Its thread gives
    the steps, so nothing else prefetches.
    """

    def __init__(
        self,
        start: RunSetup,
        source: Source,
        store: StateStore,
        options: IngestOptions,
        timings: Timings | None = None,
        poll_s: float = STOP_POLL_S,
    ) -> None:
        session = start.session
        self._poll_s = poll_s
        segment = start.segment
        record = start.record
        self._session = session
        self._source = source
        self._store = store
        self._segment = segment
        self._live = source if isinstance(source, LiveSource) else None
        self._chunk = start.chunk
        self._timings = timings
        session.timings = timings
        self._asker = StandingAsker(session, options.ask, start.answers, source, segment)
        self._thumbnails = limit_thumbnails(session, options.thumbnails)
        self._shrink = None if self._thumbnails is None else make_thumbnail
        self._subtitles = start.subtitles
        self._noted: set[str] = set()
        if self._subtitles.has_lines:
            check_memory_takes_words(session.backbone, session.config)
        if lost := read_recorded_subtitles(record).get("lost"):
            self._subtitles.lost = str(lost)
        # The wall clock log of a live source holds the losses of earlier runs.
        self._damage = (
            SourceDamage() if self._live else SourceDamage.from_dict(record.get("damage"))
        )
        self._decoders: Counter[str] = Counter(record.get("decoders"))
        mark = record.get("mark")
        self._mark = mark if type(mark) is int else None
        self._first = self._committed = session.clock
        self._began = self._committed_at = time.perf_counter()
        self._complete = segment.done
        self._bytes: int | None = None

    def watch(self, every: Every, stop: StopRequest) -> Iterator[RunItem]:
        """Read to the end of the source, or until asked to stop; the caller watches the steps."""
        yield self._started()
        yield from self._report_notes()
        if not self._segment.done:
            try:
                yield from self._watch_steps(every, stop)
            except BaseException as error:
                # An error within a step leaves half of the step in the memory: do not commit that.
                # Do not try again where writing failed.
                if self._session.intact and self._unsaved and not isinstance(error, StateError):
                    with suppress(Exception):
                        self._commit()
                        clock = self._session.clock
                        error.add_note(
                            f"{self._store.path} holds what was watched until "
                            f"{clock.stream_time_s:g} s"
                        )
                raise
            yield from self._report_notes()
            yield self._commit()
        yield self._summary()

    def _watch_steps(self, every: Every, stop: StopRequest) -> Iterator[RunItem]:
        if stop.ask():
            return
        with closing(
            self._read_file(stop) if self._live is None else self._read_live(self._live, stop)
        ) as reading:
            while not stop.decided:
                steps, news, error = _take_steps(reading, self._chunk)
                ended = error is None and not news and len(steps) < self._chunk
                if ended and stop.decided:
                    # The next run begins this chunk again.
                    break
                if steps:
                    yield from self._watch_chunk(steps)
                yield from news
                due = self._due(every) or any(isinstance(one, events.SourceLost) for one in news)
                if not stop.ask() and self._unsaved and due:
                    yield self._commit()
                if error is not None:
                    if self._watched_none:
                        raise error
                    # There is a state, although incomplete.
                    n_lost = max(1, self._damage.frames_lost)
                    self._damage = replace(self._damage, frames_lost=n_lost, message=error.message)
                    return
                if ended:
                    self._damage = self._source.damage
                    self._complete = not stop.decided
                    break
        if self._live is not None:
            self._complete = stop.is_over or not stop.decided
        if self._complete and self._watched_none:
            raise SourceUnreadable(
                f"no frame of {self._source.info.name} can be read",
                hint="look at it: is it a video, and is it whole?",
            )

    def _read_file(self, stop: StopRequest) -> Generator[PrefetchedStep, None, None]:
        return prefetch_steps(
            self._open_steps,
            self._session.backbone,
            stop,
            depth=max(PREFETCH_DEPTH, self._chunk),
            shrink=self._shrink,
            timings=self._timings,
        )

    def _read_live(
        self, source: LiveSource, stop: StopRequest
    ) -> Generator[PrefetchedStep | events.IngestEvent | None, None, None]:
        clock = self._first
        backbone = self._session.backbone
        for item in source.steps(
            clock.fps,
            clock.frames_per_step,
            self._segment,
            clock.stream_time_s,
            stop.ask,
            self._poll_s,
        ):
            if isinstance(item, VideoStep):
                yield prepare_step(item, backbone, self._shrink, self._timings)
            else:
                yield item

    def _open_steps(self, unwanted: ShouldStop) -> Iterator[VideoStep]:
        return read_steps(
            self._source,
            self._first.fps,
            self._first.frames_per_step,
            self._first.steps - self._segment.first_step,
            # Frames after a damaged place are the same only if the decoder begins at the same
            # place.
            from_beginning=not self._damage.ok,
            mark=self._mark,
            should_stop=unwanted,
        )

    def _watch_chunk(self, steps: list[PrefetchedStep]) -> Iterator[RunItem]:
        starts_s = [self._segment.start_s + step.time_s for step in steps]
        first = self._session.clock.steps
        before_s = self._session.clock.stream_time_s
        length_s = self._first.step_seconds
        texts = [self._subtitles.between(step.time_s, step.time_s + length_s) for step in steps]
        prepared = [step.prepared for step in steps]
        due = StepsToWatch(self._session, prepared, starts_s, texts)
        try:
            yield due
        finally:
            # The caller may end the run here or at an event, with these steps watched.
            if self._session.clock.steps == first + len(steps):
                self._note_watched(first, steps, starts_s)
        if due.error is not None:
            raise due.error
        answered = self._asker.ask_due(before_s)
        yield self._progress()
        yield from answered
        yield from self._report_notes()

    def _note_watched(
        self, first: int, steps: Sequence[PrefetchedStep], starts_s: Sequence[float]
    ) -> None:
        for i, (step, start_s) in enumerate(zip(steps, starts_s, strict=True)):
            if self._thumbnails is not None and step.thumbnail is not None:
                self._thumbnails.add(first + i, start_s, step.thumbnail)
            self._decoders.update(step.decoders)
        self._damage = steps[-1].damage
        self._mark = steps[-1].mark

    @property
    def _watched_none(self) -> bool:
        return self._session.clock.steps == self._segment.first_step

    @property
    def _unsaved(self) -> bool:
        return self._session.clock.steps > self._committed.steps

    def _due(self, every: Every) -> bool:
        clock = self._session.clock
        then = self._committed
        wall_s = time.perf_counter() - self._committed_at
        return every.is_due(
            clock.steps - then.steps, clock.stream_time_s - then.stream_time_s, wall_s
        )

    # ---- the state ----

    def _commit(self) -> events.Commit:
        self._committed = self._session.clock
        self._committed_at = time.perf_counter()
        record = {
            **(
                asdict(self._source.info)
                if self._live is None
                else self._live.record(self._committed.stream_time_s)
            ),
            "decoders": dict(sorted(self._decoders.items())),
            "mark": self._mark,
            "damage": None if self._damage.ok else self._damage.to_dict(),
        }
        if self._asker.kept:
            record["answers"] = [asdict(one) for one in self._asker.kept]
        if self._chunk > 1:
            record["chunk"] = self._chunk
        if self._subtitles.record:
            lost = {"lost": self._subtitles.lost} if self._subtitles.lost else {}
            record["words"] = {**self._subtitles.record, **lost}
        with time_stage(self._timings, "commit"):
            state = self._session.make_state(
                source=self._segment.record(record), complete=self._complete
            )
            self._bytes = self._store.commit(state)
        return events.Commit(
            str(self._store.path), self._committed.steps, self._committed.stream_time_s, self._bytes
        )

    # ---- the events ----

    def _report_notes(self) -> Iterator[events.SourceNoted | events.WordsLost]:
        for note in [one for one in self._source.notes if one not in self._noted]:
            self._noted.add(note)
            yield events.SourceNoted(self._source.info.name, note)
        lost = self._subtitles.lost
        if lost and lost not in self._noted:
            self._noted.add(lost)
            yield events.WordsLost(name_subtitles(self._subtitles.record) or "", lost)

    def _started(self) -> events.IngestStarted:
        session = self._session
        clock = self._session.clock
        segment = self._segment
        how: Literal["started", "continued", "appended", "finished"] = (
            "appended" if clock.steps else "started"
        )
        if segment.done or clock.steps > segment.first_step:
            how = "finished" if segment.done else "continued"
        return events.IngestStarted(
            state=str(self._store.path),
            source=self._source.info.name,
            how=how,
            steps=clock.steps,
            stream_time_s=clock.stream_time_s,
            locked=self._store.locked,
            fps=clock.fps,
            source_fps=self._source.info.rate_fps,
            state_bytes=session.state_bytes,
            most_bytes=bound_state_bytes(
                session, self._thumbnails, words=self._subtitles.has_lines
            ),
            notice=session.backbone.notice,
            model=session.backbone.identity.name,
            dtype=session.backbone.identity.dtype,
            words=name_subtitles(self._subtitles.record),
        )

    def _progress(self) -> events.IngestProgress:
        session = self._session
        clock = self._session.clock
        duration_s = self._source.info.duration_s
        end_s = duration_s and self._segment.start_s + duration_s
        frames = (clock.steps - self._first.steps) * clock.frames_per_step
        return events.IngestProgress(
            steps=clock.steps,
            stream_time_s=clock.stream_time_s,
            duration_s=end_s,
            frames_per_second=frames / (time.perf_counter() - self._began),
            state_bytes=session.state_bytes,
            end_bytes=estimate_end_bytes(session, end_s, self._thumbnails) if end_s else None,
            frames_dropped=self._live.log.frames_dropped if self._live else 0,
            tokens_seen=clock.tokens_seen,
            near_tokens=session.config.near_tokens,
            prototypes=count_prototypes(session.config),
        )

    def _summary(self) -> events.IngestSummary:
        clock = self._session.clock
        segment = self._segment
        watched_s = clock.stream_time_s
        if self._complete:
            watched_s = clip_source_end(
                watched_s, segment.start_s, self._source.info.duration_s, clock
            )
        return events.IngestSummary(
            state=str(self._store.path),
            steps=clock.steps,
            stream_time_s=clock.stream_time_s,
            watched_s=watched_s,
            tokens_seen=clock.tokens_seen,
            state_bytes=self._session.state_bytes,
            # A state that was just written may have been moved away since: do not ask the disk.
            file_bytes=StateReader.open(self._store.path).file_bytes
            if self._bytes is None
            else self._bytes,
            elapsed_s=time.perf_counter() - self._began,
            complete=self._complete,
            damaged=not self._damage.ok,
            damage=self._damage.message,
            frames_dropped=self._live.log.frames_dropped if self._live else 0,
            gaps=self._live.log.gaps_in_all if self._live else 0,
            words_lost=self._subtitles.lost or "",
        )


def _take_steps(
    reading: Iterator[PrefetchedStep | events.IngestEvent | None], n: int
) -> tuple[list[PrefetchedStep], list[events.IngestEvent | None], SourceError | None]:
    """Return the next `n` steps; fewer before news, which come next, before an error, or at the
    end.
    """
    steps: list[PrefetchedStep] = []
    try:
        for item in reading:
            if not isinstance(item, PrefetchedStep):
                return steps, [item], None
            steps.append(item)
            if len(steps) == n:
                break
    except SourceError as error:
        return steps, [], error
    return steps, [], None


def limit_thumbnails(session: Session, most: int) -> Thumbnails | None:
    """Let a session keep so many thumbnails, with those that it has, and return them; 0: none."""
    pictures = next(
        (one for one in session.attachments if isinstance(one, Thumbnails)), Thumbnails()
    )
    pictures.most = most
    others = [one for one in session.attachments if not isinstance(one, Thumbnails)]
    session.attachments = [*others, *([pictures] if most else [])]
    return pictures if most else None
