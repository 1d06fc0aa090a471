"""Prefetching gives the steps of a source in order, a bounded number early, and leaves nothing
behind.
"""

import threading
from collections.abc import Callable, Iterator
from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protokv.ingestion.prefetch import StopRequest, prefetch_steps
from protokv.video.sampling import VideoStep
from protokv.video.source import never_stop
from tests.conftest import random_frames
from tests.mock_backbone import MockBackbone

BACKBONE = MockBackbone()


class Reading:
    """Gives steps like `read_steps`; counts those that were taken, and ends once it is not wanted
    any more.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self.given = 0
        self.closed = threading.Event()

    def __call__(self, unwanted: Callable[[], bool]) -> Iterator[VideoStep]:
        try:
            while self.given < self.n and not unwanted():
                index = self.given
                self.given += 1
                yield VideoStep(index / 2, random_frames(index), ("none", "none"), mark=index)
        finally:
            self.closed.set()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    assert not any(thread.name.startswith("protokv-prefetch") for thread in threading.enumerate())


@given(n=st.integers(0, 9), depth=st.integers(1, 5), most=st.integers(1, 9))
def test_steps_come_in_order_none_too_early_and_closing_them_ends_the_reading(
    n: int, depth: int, most: int
) -> None:
    reading = Reading(n)
    taken = 0
    steps = prefetch_steps(reading, BACKBONE, StopRequest(never_stop), depth=depth)
    for step in islice(steps, most):
        # Besides those that wait, one is in the hands of the thread and one in ours.
        assert reading.given <= taken + depth + 2
        assert (step.time_s, step.mark, step.decoders) == (taken / 2, taken, ("none", "none"))
        assert torch.equal(step.prepared.pixels, BACKBONE.prepare(random_frames(taken)).pixels)
        taken += 1
    steps.close()
    assert (taken, reading.closed.is_set()) == (min(n, most), True)


def test_the_caller_is_asked_in_its_own_thread_and_a_source_that_waits_is_told() -> None:
    asked = set()
    answers = iter([False] * 3)

    def should_stop() -> bool:
        asked.add(threading.get_ident())
        return next(answers, True)

    def silent(unwanted: Callable[[], bool]) -> Iterator[VideoStep]:
        while not unwanted():
            pass
        yield from ()

    stop = StopRequest(should_stop)
    assert list(prefetch_steps(silent, BACKBONE, stop)) == []
    answers = iter([False])
    assert stop.decided
    assert stop.ask()  # a Yes is remembered
    assert asked == {threading.get_ident()}
