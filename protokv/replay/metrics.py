"""Accuracies with intervals, and quantiles of latencies, from rows of results.

Intervals by bootstrap over videos, and paired differences between memories.

Answers about one video go together: a memory that lost its evidence gets all of its questions wrong. So videos are
drawn anew, with all that was asked about them, and not answers (cluster bootstrap: Davison and Hinkley 1997, section
3.8; percentiles of `DRAWS` draws, seeded). A difference is of answers to the same questions at the same delay.
Knows no tables.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from protokv.replay.rows import Row

# The normal quantile of a two-sided 95 % interval.
Z: Final = 1.959963984540054

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Accuracy:
    """`right` of `n` answers, with Wilson's 95 % score interval [low, high] (Wilson 1927)."""

    right: int
    n: int

    @property
    def share(self) -> float:
        """right / n; NaN of nothing."""
        return self.right / self.n if self.n else math.nan

    @property
    def low(self) -> float:
        """Lower end of the interval."""
        return max(0.0, self._middle - self._half) if self.n else math.nan

    @property
    def high(self) -> float:
        """Upper end of the interval."""
        return min(1.0, self._middle + self._half) if self.n else math.nan

    def to_dict(self) -> dict[str, float]:
        """As reports have it, plain JSON."""
        shares = {"accuracy": self.share, "low": self.low, "high": self.high}
        return {"n": self.n} | {name: round(value, 4) for name, value in shares.items()}

    @property
    def _middle(self) -> float:
        return (self.share + Z * Z / (2 * self.n)) / (1 + Z * Z / self.n)

    @property
    def _half(self) -> float:
        spread = self.share * (1 - self.share) / self.n + Z * Z / (4 * self.n**2)
        return Z * math.sqrt(spread) / (1 + Z * Z / self.n)


def measure_accuracy(
    rows: Iterable[Row], by: Callable[[Row], K], right: Callable[[Row], bool] = attrgetter("correct")
) -> dict[K, Accuracy]:
    """Measure the accuracy of every group of rows, in order of first appearance."""
    return count_right((by(row), right(row)) for row in rows)


def count_right(answers: Iterable[tuple[K, bool]]) -> dict[K, Accuracy]:
    """The accuracy of every group of answers, each with whether it is right, in order of first appearance."""
    counts: dict[K, list[int]] = defaultdict(lambda: [0, 0])
    for group, right in answers:
        counts[group][0] += right
        counts[group][1] += 1
    return {group: Accuracy(right, n) for group, (right, n) in counts.items()}


def measure_floor(rows: Iterable[Row]) -> float:
    """Accuracy of always giving the most frequent answer of a question's type: possible without any video."""
    answers: dict[str, dict[tuple[str, str], str]] = defaultdict(dict)
    for row in rows:
        answers[row.type][row.video, row.question_id] = row.expected
    best = sum(max(Counter(kind.values()).values()) for kind in answers.values())
    n = sum(map(len, answers.values()))
    return best / n if n else math.nan


def find_constant(rows: Iterable[Row]) -> tuple[str, dict[tuple[str, str], bool]]:
    """The one answer that is right most often, and of which questions it is: what needs neither video nor question."""
    expected = {(row.video, row.question_id): row.expected for row in rows}
    answer = max(sorted(counts), key=counts.__getitem__) if (counts := Counter(expected.values())) else ""
    return answer, {question: text == answer for question, text in expected.items()}


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that a share of the values does not exceed (nearest rank, no interpolation); NaN of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


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
