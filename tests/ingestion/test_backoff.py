"""Pauses double up to a limit, are spread over their upper half, and begin anew after success."""

from __future__ import annotations

import pytest

from protokv.ingestion.live.reader import Backoff


@pytest.mark.parametrize(("draw", "part"), [(0.0, 0.5), (1.0, 1.0), (0.5, 0.75)])
def test_pauses_double_up_to_the_longest_and_begin_anew(draw, part):
    backoff = Backoff(1.0, 10.0, lambda: draw)
    assert [backoff.next_s() for _ in range(6)] == [n * part for n in (1, 2, 4, 8, 10, 10)]
    backoff.reset()
    assert backoff.next_s() == part
