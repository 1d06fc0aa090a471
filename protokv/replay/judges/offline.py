"""Comparison without a reader: the same text, or enough tokens in common. Labelled as such wherever it stands.

It serves short answers of known wording (the procedural world, yes / no, names), and open answers until a judge has
read them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from protokv.replay.judges.base import Case, Judge, Verdict
from protokv.replay.texts import F1_RIGHT, F1_RULE, is_expected, token_f1


class ExactJudge(Judge):
    """Right is the same text but for case, spaces and a final full stop."""

    label = "offline, exact text"

    def read(self, cases: Sequence[Case]) -> Iterator[tuple[int, Verdict | None]]:
        """Compare each."""
        for index, case in enumerate(cases):
            yield index, Verdict(is_expected(case.prediction, case.expected))


class F1Judge(Judge):
    """Right is half of the tokens shared; points are five times that share (F1), rounded down."""

    label = F1_RULE

    def read(self, cases: Sequence[Case]) -> Iterator[tuple[int, Verdict | None]]:
        """Compare each."""
        for index, case in enumerate(cases):
            share = token_f1(case.prediction, case.expected)
            yield index, Verdict(share >= F1_RIGHT, float(int(5 * share)))
