"""What a report says of a published data set besides accuracies: its protocol, its own means, and what needs no video.

One number of a benchmark means nothing without the frames, the budget, the wording and the floor that it stands on, so
they are one record with it. Knows no terminal.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from protokv.replay.benchmarks import BENCHMARKS
from protokv.replay.metrics import Accuracy, count_right, find_constant, measure_accuracy
from protokv.replay.question_types import find_type
from protokv.replay.rows import Row

AGES_S: Final = (0.0, 5.0, 30.0, 120.0, math.inf)
"""Borders of the ages of evidence that accuracy is shown for."""


def summarise_benchmark(rows: Sequence[Row]) -> dict[str, Any] | None:
    """The record of a data set, plain JSON; None where the rows are of none, or of several.

    `scores` has, for every memory, budget and delay, accuracy by the official and by the strict rule, the mean of a
    judge's points, the means that papers print (`Benchmark.means`) and, where the evidence is known and questions were
    asked at their own times, accuracy by its age. `constant` is the best single answer for all questions. `judges`
    counts who decided.
    """
    names = {row.dataset for row in rows}
    if len(names) != 1 or not names <= BENCHMARKS.keys():
        return None
    benchmark = BENCHMARKS[names.pop()]
    answer, right = find_constant(rows)
    kinds = {(row.video, row.question_id): row.type for row in rows}
    groups = {kind: find_type(kind, benchmark.name).group for kind in kinds.values()}
    by_kind = _shares(count_right((kinds[question], hit) for question, hit in right.items()))
    by_group = _shares(count_right((groups[kinds[question]], hit) for question, hit in right.items()))
    return {
        "dataset": benchmark.name,
        "source": benchmark.source,
        "licence": benchmark.licence,
        "prompt_hash": sorted({row.prompt_hash for row in rows}),
        "judges": dict(Counter(row.judge or "the rule of the data set" for row in rows)),
        "constant": {
            "answer": answer,
            "accuracy": round(sum(right.values()) / len(right), 4),
            "groups": _round(by_group),
            "types": _round(by_kind),
            "means": _round(benchmark.means(by_kind)),
        },
        "scores": [
            _score(own, key)
            for key in dict.fromkeys((row.memory, row.budget, row.delay_s) for row in rows)
            if (own := [row for row in rows if (row.memory, row.budget, row.delay_s) == key])
        ],
    }


def _score(rows: Sequence[Row], key: tuple[str, int, float]) -> dict[str, Any]:
    benchmark = BENCHMARKS[rows[0].dataset]
    official = measure_accuracy(rows, lambda row: row.type)
    strict = measure_accuracy(rows, lambda row: row.type, _strict)
    points = [row.points for row in rows if row.points is not None]
    return {
        "memory": key[0],
        "budget": key[1],
        "delay_s": key[2],
        "n": len(rows),
        "videos": len({row.video for row in rows}),
        "official": round(sum(row.correct for row in rows) / len(rows), 4),
        "strict": round(sum(map(_strict, rows)) / len(rows), 4),
        "points": round(sum(points) / len(points), 3) if points else None,
        "judged": len(points),
        "means": {
            "official": _round(benchmark.means(_shares(official))),
            "strict": _round(benchmark.means(_shares(strict))),
        },
        "ages": _measure_ages(rows),
    }


def _measure_ages(rows: Sequence[Row]) -> list[dict[str, Any]]:
    aged = [(row.reference_s + row.delay_s - row.evidence_s, row) for row in rows if row.evidence_s is not None]
    found = []
    for low, high in pairwise(AGES_S):
        own = [row for age, row in aged if low <= age < high]
        if own:
            accuracy = Accuracy(sum(row.correct for row in own), len(own))
            found.append({"from_s": low, "to_s": None if math.isinf(high) else high, **accuracy.to_dict()})
    return found


def _strict(row: Row) -> bool:
    return row.correct if row.strict is None else row.strict


def _shares(found: Mapping[str, Accuracy]) -> dict[str, float]:
    return {name: accuracy.share for name, accuracy in found.items()}


def _round(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in values.items()}
