"""What came of a replay, as plain numbers: accuracy against delay, by type, and what it cost. Knows no terminal.

What a report says of a published data set besides accuracies: its protocol, its own means, and what needs no video.

One number of a benchmark means nothing without the frames, the budget, the wording and the floor that it stands on, so
they are one record with it. Knows no terminal.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from protokv.config import DEFAULT, FullConfig
from protokv.replay.benchmarks import BENCHMARKS
from protokv.replay.metrics import (
    Accuracy,
    compare,
    count_right,
    find_constant,
    measure_accuracy,
    measure_floor,
    quantile,
    resample,
)
from protokv.replay.questions import OTHER, find_type, order_groups
from protokv.replay.rows import Row

FEW_QUESTIONS, FEW_VIDEOS = 100, 5
"""A point on fewer of either is marked: its interval is wide, or a few videos decide it."""


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """The whole report, plain JSON.

    `curves` has one entry per memory and budget with its accuracy at every delay, over all questions, by group and by
    type; a point is `thin` if it stands on few questions or videos, and its interval is the wider one of Wilson's and
    of a bootstrap over videos; `differences` has accuracy less that of another memory at the same budget, and of the
    full cache, on the same questions; `costs` what it cost; `benchmark` what a published
    data set adds (`summarise_benchmark`), None of others; `reference` how many questions count their delay from the
    evidence, from the query time and from the end of the stream; `floor` and `floors` the accuracy of always giving the
    most frequent answer of a question's type; `setup` which model answered, where and how.
    """
    labels = list(dict.fromkeys((row.memory, row.budget) for row in rows))
    delays = sorted({row.delay_s for row in rows})
    overall = measure_accuracy(rows, lambda row: (row.memory, row.budget, row.delay_s))
    grouped = measure_accuracy(rows, lambda row: (row.memory, row.budget, row.delay_s, _group(row)))
    typed = measure_accuracy(rows, lambda row: (row.memory, row.budget, row.delay_s, row.type))
    scores: dict[Any, dict[str, list[float]]] = {}
    for row in rows:
        key = (row.memory, row.budget, row.delay_s)
        for cell in {key, (*key, _group(row)), (*key, row.type)}:
            scores.setdefault(cell, {}).setdefault(row.video, []).append(float(row.correct))
    questions = {(row.video, row.question_id): row for row in rows}
    present = {_group(row) for row in questions.values()}
    known = dict.fromkeys(name for dataset in {row.dataset: None for row in rows} for name in order_groups(dataset))
    groups = [name for name in known if name in present and name != OTHER] + [OTHER] * (OTHER in present)
    if groups == [OTHER]:
        # The same as all questions.
        groups = []
    types = sorted({row.type for row in questions.values()})

    def points(found: dict[Any, Accuracy], *key: str) -> list[dict[str, Any]]:
        cells = [(delay, (*label, delay, *key)) for delay in delays]
        return [_point(delay, found[cell], scores[cell]) for delay, cell in cells if cell in found]

    curves, costs = [], []
    for label in labels:
        own = [row for row in rows if (row.memory, row.budget) == label]
        curves.append(
            {
                "memory": label[0],
                "budget": label[1],
                "all": points(overall),
                "groups": {name: points(grouped, name) for name in groups},
                "types": {name: points(typed, name) for name in types},
            }
        )
        costs.append({"memory": label[0], "budget": label[1], **_cost(own)})
    references = [row.reference for row in questions.values()]
    return {
        "videos": len({row.video for row in rows}),
        "questions": len(questions),
        "reference": {name: references.count(name) for name in sorted(set(references))},
        "floor": _number(measure_floor(rows)),
        "floors": {
            "groups": {name: _number(measure_floor([r for r in rows if _group(r) == name])) for name in groups},
            "types": {name: _number(measure_floor([r for r in rows if r.type == name])) for name in types},
        },
        "benchmark": summarise_benchmark(rows),
        "setup": _describe_setup(rows),
        "delays_s": delays,
        "curves": curves,
        "differences": _compare(rows, groups),
        "costs": costs,
    }


def _group(row: Row) -> str:
    return find_type(row.type, row.dataset).group


def _point(delay: float, accuracy: Accuracy, scores: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    low, high = resample(scores)
    return {
        "delay_s": delay,
        **accuracy.to_dict(),
        "videos": len(scores),
        "thin": accuracy.n < FEW_QUESTIONS or len(scores) < FEW_VIDEOS,
        # Videos that are all alike would have none, and few of them too narrow an interval.
        "low": round(min(low, accuracy.low), 4),
        "high": round(max(high, accuracy.high), 4),
    }


def _compare(rows: Sequence[Row], groups: Sequence[str]) -> list[dict[str, Any]]:
    """The default memory, or the first there is, less each other one at its budget; and less the full cache."""
    labels = dict.fromkeys((row.memory, row.budget) for row in rows)
    names = [name for name, _ in labels]
    own = DEFAULT if DEFAULT in names else next(iter(names), "")
    pairs = [
        ((own, budget), other)
        for budget in dict.fromkeys(budget for name, budget in labels if name == own)
        for other in labels
        if other[0] != own and (other[1] == budget or (other[0] == FullConfig.name and names.count(other[0]) == 1))
    ]
    found = []
    for group in ("all", *groups):
        cells: dict[Any, list[Row]] = {}
        for row in rows:
            if group in ("all", _group(row)):
                cells.setdefault((row.memory, row.budget, row.delay_s), []).append(row)
        delays = sorted({delay for *_, delay in cells})
        for one, other in pairs:
            compared = [(d, compare(cells.get((*one, d), ()), cells.get((*other, d), ()))) for d in delays]
            points = [
                {
                    "delay_s": delay,
                    "n": difference.n,
                    "videos": difference.videos,
                    "difference": round(difference.share, 4),
                    "low": round(difference.low, 4),
                    "high": round(difference.high, 4),
                }
                for delay, difference in compared
                if difference is not None
            ]
            if points:
                found.append(
                    {"group": group, "memory": own, "budget": one[1], "than": other[0], "than_budget": other[1]}
                    | {"points": points}
                )
    return found


def _cost(rows: Sequence[Row]) -> dict[str, Any]:
    ttft, total = [row.ttft_ms for row in rows], [row.total_ms for row in rows]
    return {
        "ttft_ms_median": quantile(ttft, 0.5),
        "ttft_ms_p95": quantile(ttft, 0.95),
        "total_ms_median": quantile(total, 0.5),
        "total_ms_p95": quantile(total, 0.95),
        "context_tokens": max(row.context_tokens for row in rows),
        "state_bytes": max(row.state_bytes for row in rows),
        "step_ms": quantile([row.step_ms for row in rows], 0.5),
        "compression": round(max(row.tokens_seen / max(1, row.context_tokens) for row in rows), 2),
    }


def _describe_setup(rows: Sequence[Row]) -> dict[str, Any]:
    if not rows:
        return {}
    first = rows[0]
    return {
        "model": first.model["name"],
        "dtype": first.model["dtype"],
        "weights_digest": first.model["weights_digest"],
        "frames": first.frames,
        "tokens_per_step": round(
            max(
                (row.tokens_seen * row.stream["fps"] / row.stream.get("frames_per_step", 1)) / row.asked_s
                if row.asked_s
                else 0.0
                for row in rows
            ),
            1,
        ),
        "devices": sorted({row.device for row in rows}),
        "fps": first.stream["fps"],
        "max_new_tokens": first.decoding["max_new_tokens"],
        "protocol": first.protocol,
    }


def format_delay(seconds: float) -> str:
    """A delay as every table and axis writes it: `0 s`, `90 s`, `2 min`, `1 h`."""
    for unit, name in ((3600, "h"), (60, "min")):
        if seconds and seconds % unit == 0:
            return f"{seconds / unit:g} {name}"
    return f"{seconds:g} s"


def format_group(name: str) -> str:
    """A group as a heading: `all questions`, `content questions`."""
    return f"{name} questions"


def format_type(name: str) -> str:
    """A type as a heading: `which first`."""
    return name.replace("_", " ") or "without a type"


def _number(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 4)


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
