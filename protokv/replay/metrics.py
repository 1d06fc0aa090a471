"""Accuracies with intervals, paired differences, floors, and quantiles of latencies, from rows of
results.

Answers about one video go together: a memory that lost its evidence gets all of its questions
wrong. So the bootstrap draws videos with all of their answers (cluster bootstrap: Davison and
Hinkley 1997, section 3.8; percentiles of `_DRAWS` seeded draws). A difference is of answers to the
same questions at the same delay.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from protokv.replay.rows import AnswerRow

_DRAWS = 2000
# A number on fewer of either is marked: its interval is wide, or a few videos decide it.
FEW_QUESTIONS = 100
FEW_VIDEOS = 5
_Z = 1.959963984540054  # the normal quantile of a two-sided 95 % interval


def score_majority(rows: Iterable[AnswerRow]) -> float:
    """Return the accuracy of the most frequent answer of each question's type, which needs no
    video; NaN of no rows.
    """
    answers: dict[str, dict[tuple[str, str], str]] = defaultdict(dict)
    for row in rows:
        answers[row.type][row.video, row.question_id] = row.expected
    best = sum(max(Counter(kind.values()).values()) for kind in answers.values())
    n = sum(map(len, answers.values()))
    return best / n if n else math.nan


@dataclass(frozen=True, slots=True)
class AccuracyDifference:
    """Accuracy of one memory less that of another, with its 95 % interval, of `n` questions."""

    share: float
    low: float
    high: float
    n: int


def bootstrap(scores: Mapping[str, Sequence[float]]) -> tuple[float, float]:
    """Return the 95 % interval of the mean of scores by video, at least one, by bootstrap over
    videos.
    """
    sums = np.array([sum(found) for found in scores.values()], dtype=float)
    counts = np.array([len(found) for found in scores.values()], dtype=float)
    weights = _draw(len(sums))
    low, high = np.quantile(weights @ sums / (weights @ counts), (0.025, 0.975))
    return float(low), float(high)


def bound_accuracy(right: int, n: int) -> tuple[float, float]:
    """Return Wilson's 95 % score interval of `right` of n > 0 answers (Wilson 1927)."""
    share = right / n
    whole = 1 + _Z * _Z / n
    middle = (share + _Z * _Z / (2 * n)) / whole
    half = _Z * math.sqrt(share * (1 - share) / n + _Z * _Z / (4 * n**2)) / whole
    return max(0.0, middle - half), min(1.0, middle + half)


def bound_share(scores: Mapping[str, Sequence[bool]]) -> tuple[float, float]:
    """Return the wider one of the bootstrap's and Wilson's 95 % interval of right answers by video:
    the former gives none to videos that agree, and too narrow a one to few videos.
    """
    flat = [one for found in scores.values() for one in found]
    lows, highs = zip(bootstrap(scores), bound_accuracy(sum(flat), len(flat)), strict=True)
    return min(lows), max(highs)


def compare_paired(
    rows: Iterable[AnswerRow], others: Iterable[AnswerRow]
) -> AccuracyDifference | None:
    """Compare rows with others over the questions and delays that both answered; None if there is
    none.

    The interval is the widest of three: the bootstrap over videos, which is too narrow for few
    videos; the normal one of n paired answers; and 3 / n to either side, which is that of an event
    that was not seen in n answers.
    """
    known = {(row.video, row.question_id, row.delay_s): row.correct for row in others}
    scores: dict[str, list[float]] = {}
    for row in rows:
        key = (row.video, row.question_id, row.delay_s)
        if key in known:
            scores.setdefault(row.video, []).append(float(row.correct) - known[key])
    flat = [score for found in scores.values() for score in found]
    if not flat:
        return None
    low, high = bootstrap(scores)
    share = sum(flat) / len(flat)
    half = max(_Z * float(np.std(flat)) / math.sqrt(len(flat)), 3 / len(flat))
    low = max(-1.0, min(low, share - half))
    high = min(1.0, max(high, share + half))
    return AccuracyDifference(share, low, high, len(flat))


@lru_cache(maxsize=8)
def _draw(videos: int) -> NDArray[np.float64]:
    """Return how often each draw takes each video, `[_DRAWS, videos]`."""
    rng = np.random.default_rng([17, videos])
    found: NDArray[np.float64] = rng.multinomial(
        videos, np.full(videos, 1 / videos), size=_DRAWS
    ).astype(float)
    return found
