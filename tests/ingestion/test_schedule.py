"""A run ends after a stream time or at a real time, and real time counts while a live source gives nothing."""

from __future__ import annotations

import pytest

from protokv.errors import ConfigError
from protokv.ingestion.schedule import Ending, Every


@pytest.mark.parametrize(
    ("options", "live", "stream_s", "passed_s", "over"),
    [
        ({"for_s": None, "until": None}, True, 1e9, 1e9, False),
        ({"for_s": 60.0, "until": None}, False, 159.0, 1e6, False),
        ({"for_s": 60.0, "until": None}, False, 160.0, 0.0, True),
        ({"for_s": 60.0, "until": None}, True, 100.0, 59.0, False),
        ({"for_s": 60.0, "until": None}, True, 100.0, 60.0, True),
        ({"for_s": None, "until": 1e9 + 5}, False, 100.0, 4.0, False),
        ({"for_s": None, "until": 1e9 + 5}, False, 100.0, 5.0, True),
    ],
)
def test_a_run_ends_when_it_was_told_to_and_stays_ended(options, live, stream_s, passed_s, over):
    now_s = 0.0
    ending = Ending(from_s=100.0, live=live, clock=lambda: now_s, now=lambda: 1e9 + now_s, **options)
    assert not ending.reached(100.0)
    now_s = passed_s
    assert ending.reached(stream_s) is over
    now_s = 0.0
    assert ending.over is over


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["seconds", "n_steps", "wall_s"])
def test_an_interval_of_nothing_is_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match="cannot commit every"):
        Every(**{name: value})
