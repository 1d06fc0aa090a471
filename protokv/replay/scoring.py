"""Whether an answer is right, when it is given: by the rule of its data set, and else by comparison of texts."""

from __future__ import annotations

from dataclasses import dataclass

from protokv.replay.benchmarks import BENCHMARKS
from protokv.replay.benchmarks.choices import named_option
from protokv.replay.rows import Trial
from protokv.replay.texts import F1_RULE, is_expected


@dataclass(frozen=True, slots=True)
class Scored:
    """A score and who gave it.

    Attributes:
        official, strict: as in `Score`.
        judge: the rule, where it is not the data set's own.
    """

    official: bool
    strict: bool
    judge: str = ""


def score(trial: Trial, prediction: str) -> Scored:
    """Score an answer.

    The bare question has no letters to choose from: there an answer is the option that it spells out.
    """
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
