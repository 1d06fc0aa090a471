"""What a judge is, and judging rows that are there already.

An answer is judged after it was given, from the texts in its row, so that a pass never waits for a network and a second
judge costs no second pass. A judged row is appended once more; of the same row the last one counts. Knows no judge.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from protokv.replay.benchmarks import BENCHMARKS
from protokv.replay.rows import Row, RowFile


@dataclass(frozen=True, slots=True)
class Case:
    """What a judge reads."""

    question: str
    expected: str
    prediction: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What it says: right or wrong, and points from 0 to 5 if it gives any."""

    correct: bool
    points: float | None = None


class Judge(ABC):
    """Somebody who reads open answers.

    Attributes:
        label: who it is, with the digest of what it is asked; stands in every row that it judged.
    """

    label: str

    @abstractmethod
    def read(self, cases: Sequence[Case]) -> Iterator[tuple[int, Verdict | None]]:
        """Judge cases in any order.

        Yields:
            The number of a case and the verdict; None where there is none, whatever was tried.

        Raises:
            JudgeError: it cannot judge at all.
        """


def judge_rows(results: RowFile, keys: Sequence[str], judge: Judge) -> Iterator[Row | None]:
    """Have open answers judged that this judge has not judged yet; every row is in the file before it is yielded.

    Args:
        results: the file.
        keys: of the rows to look at.
        judge: who judges.

    Yields:
        The judged row, or None where there was no verdict: it keeps the one that it had.
    """
    rows = [results.rows[key] for key in keys if key in results.rows]
    left = [row for row in rows if is_open(row) and row.judge != judge.label]
    for index, verdict in judge.read([Case(row.question, row.expected, row.prediction) for row in left]):
        if verdict is None:
            yield None
            continue
        judged = replace(left[index], correct=verdict.correct, points=verdict.points, judge=judge.label)
        results.append(judged)
        yield judged


def is_open(row: Row) -> bool:
    """Whether its answer is a sentence that somebody must read."""
    return row.dataset in BENCHMARKS and BENCHMARKS[row.dataset].open_ended
