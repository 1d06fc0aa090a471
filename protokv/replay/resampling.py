"""Intervals by bootstrap over videos, and paired differences between memories.

Answers about one video go together: a memory that lost its evidence gets all of its questions wrong. So videos are
drawn anew, with all that was asked about them, and not answers (cluster bootstrap: Davison and Hinkley 1997, section
3.8; percentiles of `DRAWS` draws, seeded). A difference is of answers to the same questions at the same delay.
Knows no tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from protokv.replay.rows import Row

DRAWS: Final = 2000
_SEED: Final = 17
_TAILS: Final = (0.025, 0.975)


@dataclass(frozen=True, slots=True)
class Difference:
    """Accuracy of one memory less that of another, with its 95 % interval; `n` questions about `videos` videos."""

    share: float
    low: float
    high: float
    n: int
    videos: int


def resample(scores: Mapping[str, Sequence[float]]) -> tuple[float, float]:
    """95 % interval of the mean score, by videos drawn anew.

    Args:
        scores: of the answers about each video; at least one answer.
    """
    sums = np.array([sum(found) for found in scores.values()], dtype=float)
    counts = np.array([len(found) for found in scores.values()], dtype=float)
    weights = _draw(len(sums))
    low, high = np.quantile(weights @ sums / (weights @ counts), _TAILS)
    return float(low), float(high)


def compare(rows: Iterable[Row], others: Iterable[Row]) -> Difference | None:
    """What the first rows have right more often, over the questions and delays that both answered; None if none.

    Where no answer differs, the interval is that of a share of which nothing was seen in n answers: 3 / n.
    """
    known = {(row.video, row.question_id, row.delay_s): row.correct for row in others}
    scores: dict[str, list[float]] = {}
    for row in rows:
        other = known.get((row.video, row.question_id, row.delay_s))
        if other is not None:
            scores.setdefault(row.video, []).append(float(row.correct) - float(other))
    flat = [score for found in scores.values() for score in found]
    if not flat:
        return None
    low, high = resample(scores) if any(flat) else (-min(1.0, 3 / len(flat)), min(1.0, 3 / len(flat)))
    return Difference(sum(flat) / len(flat), low, high, len(flat), len(scores))


@lru_cache(maxsize=8)
def _draw(videos: int) -> NDArray[np.float64]:
    """How often each video is drawn, `[DRAWS, videos]`."""
    rng = np.random.default_rng([_SEED, videos])
    found: NDArray[np.float64] = rng.multinomial(videos, np.full(videos, 1 / videos), size=DRAWS).astype(float)
    return found
