"""One run over a live source: like every run, but it waits, goes on after losses, and tells of both.

The thread that reads the source gives the steps, so nothing else prefetches. A live source has only the end that the
user sets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

from protokv.errors import SourceError, SourceUnreadable
from protokv.ingestion.events import Event, Progress, SourceLost, Summary
from protokv.ingestion.growing_file import GrowingFile
from protokv.ingestion.live.source import LiveSource
from protokv.ingestion.prefetch import Stop
from protokv.ingestion.schedule import Ending, Every
from protokv.ingestion.watching import Run, Start
from protokv.storage.writer import Writer
from protokv.timings import Timings
from protokv.video import Source, Step

_END = object()


class LiveRun(Run):
    """A `Run` whose steps come from a live source, until `ending` or until the source is given up."""

    def __init__(
        self,
        start: Start,
        source: LiveSource,
        file: GrowingFile,
        writer: Writer,
        ending: Ending,
        timings: Timings | None = None,
    ) -> None:
        """Prepare the run, as `Run` does. The source is opened when it is watched."""
        super().__init__(start, cast(Source, source), file, writer, timings=timings)
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
                session.watch(step.images, segment.start_s + step.time_s)
                self._decoders.update(step.decoders)
                yield self._progress()
            elif step is not None:
                yield step  # type: ignore[misc]
            yield from self._events(self._writer.landed())
            if self._unsaved and not stop.decided and (isinstance(step, SourceLost) or self._due(every)):
                yield from self._commit()
        self._complete = self._ending.over or not stop.decided
        if self._complete and session.clock.steps == segment.first_step:
            raise SourceUnreadable(f"no frame of {self._live.info.name} came", hint="look at the source")

    def _described(self) -> dict[str, Any]:
        return self._live.record(self._committed.stream_time_s)

    def _progress(self) -> Progress:
        return replace(super()._progress(), frames_dropped=self._live.log.frames_dropped)

    def _summary(self) -> Summary:
        log = self._live.log
        return replace(super()._summary(), frames_dropped=log.frames_dropped, gaps=log.gaps_in_all)
