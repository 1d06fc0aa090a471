"""Several sources in one process: what is due of them at the same time is watched together."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace

from protokv.ingestion.events import IngestEvent
from protokv.ingestion.options import IngestOptions
from protokv.ingestion.run import AnySource, begin_run
from protokv.stream.seeing import StepsToWatch, watch_together
from protokv.video.source import ShouldStop, never_stop

IDLE_S = 0.02
"""A pause while no source gives anything."""


def ingest_together(
    sources: Mapping[str, AnySource],
    options: IngestOptions,
    should_stop: ShouldStop = never_stop,
) -> Generator[tuple[str, IngestEvent | Exception], None, None]:
    """Watch several sources, such as cameras, each into the state that it is named by.

    The model is loaded once. A live source that gives nothing holds nobody up; a file is waited
    for.

    Yields:
        The events of each run, as `ingest_events`, with its state; or why it ended, which leaves
        the others alone.

    Raises:
        ModelError: the model cannot be loaded.
    """
    # One model for all: a system prompt is a copy of it, which would be another one each time.
    options = replace(options, backbone=options.load_model(), system=None)
    due = list[StepsToWatch]()

    def take(target: str) -> Iterator[tuple[str, IngestEvent | Exception]]:
        """Yield the events of a run until it gives nothing, ends, or has steps, which are due."""
        try:
            for item in live[target]:
                if item is None:
                    return
                if isinstance(item, StepsToWatch):
                    due.append(item)
                    return
                yield target, item
        except Exception as error:
            yield target, error
        del live[target]

    with ExitStack() as opened:
        live = {
            target: opened.enter_context(
                closing(begin_run(source, target, options, should_stop, poll_s=0.0))
            )
            for target, source in sources.items()
        }
        while live:
            for target in list(live):
                yield from take(target)
            watch_together(due)
            if live and not due:
                time.sleep(IDLE_S)
            due.clear()
