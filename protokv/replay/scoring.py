"""The score of an answer when it is given: by the rule of its data set, or by comparison of texts."""

from __future__ import annotations

from dataclasses import dataclass

from protokv.replay.benchmarks import BENCHMARKS
from protokv.replay.benchmarks.choices import named_option
from protokv.replay.rows import Trial
from protokv.replay.texts import F1_RULE, is_expected


@dataclass(frozen=True, slots=True)
class Scored:
    """A score and its rule.

    Attributes:
        official, strict: as in `Score`.
        judge: the rule; empty: the data set's own.
    """

    official: bool
    strict: bool
    judge: str = ""


def score(trial: Trial, prediction: str) -> Scored:
    """Score an answer. The answer to a bare question spells out an option instead of its letter."""
    if trial.dataset not in BENCHMARKS:
        right = is_expected(prediction, trial.expected)
        return Scored(right, right)
    benchmark = BENCHMARKS[trial.dataset]
    if trial.prompt_hash == "bare" and trial.options:
        right = named_option(prediction, trial.options) == trial.expected
        return Scored(right, right, "the option that the answer spells out")
    if trial.prompt_hash == "bare" and not benchmark.open_ended:
        right = is_expected(prediction, trial.expected)
        return Scored(right, right, "exact text")
    found = benchmark.score(prediction, trial.expected, trial.type, trial.options)
    return Scored(found.official, found.strict, F1_RULE if benchmark.open_ended else "")
