"""The report of a replay, as plain JSON values: accuracies, differences, costs, and facts of a benchmark."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from protokv.memories import DEFAULT, FullConfig
from protokv.replay.benchmarks import BENCHMARKS, find_type, order_groups
from protokv.replay.conclusion import conclude
from protokv.replay.metrics import (
    FEW_QUESTIONS,
    FEW_VIDEOS,
    Accuracy,
    compare,
    count_right,
    find_constant,
    measure_floor,
    quantile,
    resample,
)
from protokv.replay.questions import OTHER
from protokv.replay.rows import Row

AGES_S: Final = (0.0, 5.0, 30.0, 120.0, math.inf)
"""Borders of the ages of evidence for which accuracy is shown."""


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the whole report.

    - `conclusion`: see `conclude`.
    - `curves`: for every memory and budget the accuracy at every delay, over all questions, by group and by type. A
      point is `thin` if it has few questions or videos; its interval is the wider one of Wilson's and of a bootstrap
      over videos.
    - `differences`: accuracy less that of another memory at the same budget, and of the full cache, on the same
      questions.
    - `costs`: latencies, tokens and bytes of every memory.
    - `reference`: number of questions whose delay counts from the evidence, the query time, the end of the stream.
    - `floor`, `floors`: accuracy of the most frequent answer of each question's type.
    - `setup`: the model, and where and how it ran.
    - `benchmark`: see `summarise_benchmark`; None without one.
    """
    questions = {(row.video, row.question_id): row for row in rows}
    groups, types = _order(list(questions.values())), sorted({row.type for row in questions.values()})
    scores: dict[Any, dict[str, list[bool]]] = {}
    for row in rows:
        key = (row.memory, row.budget, row.delay_s)
        for part in ("all", ("group", _group(row)), ("type", row.type)):
            scores.setdefault((*key, part), {}).setdefault(row.video, []).append(row.correct)
    delays = sorted({row.delay_s for row in rows})

    def points(memory: str, budget: int, part: object) -> list[dict[str, Any]]:
        cells = [(delay, scores.get((memory, budget, delay, part))) for delay in delays]
        return [_point(delay, cell) for delay, cell in cells if cell]

    curves, costs = [], []
    for memory, budget in dict.fromkeys((row.memory, row.budget) for row in rows):
        label = {"memory": memory, "budget": budget}
        curves.append(
            label
            | {
                "all": points(memory, budget, "all"),
                "groups": {name: points(memory, budget, ("group", name)) for name in groups},
                "types": {name: points(memory, budget, ("type", name)) for name in types},
            }
        )
        costs.append(label | _cost([row for row in rows if (row.memory, row.budget) == (memory, budget)]))
    references = Counter(row.reference for row in questions.values())
    return {
        "conclusion": conclude(rows, curves),
        "videos": len({row.video for row in rows}),
        "questions": len(questions),
        "reference": dict(sorted(references.items())),
        "floor": _floor(rows),
        "floors": {
            "groups": {name: _floor([row for row in rows if _group(row) == name]) for name in groups},
            "types": {name: _floor([row for row in rows if row.type == name]) for name in types},
        },
        "benchmark": summarise_benchmark(rows),
        "setup": _describe_setup(rows),
        "delays_s": delays,
        "curves": curves,
        "differences": list(_compare(rows, groups)),
        "costs": costs,
    }


def _order(questions: Sequence[Row]) -> list[str]:
    """Return the groups of the questions in the order of tables; none if all questions are of the group OTHER."""
    present = {_group(row) for row in questions}
    datasets = dict.fromkeys(row.dataset for row in questions)
    known = dict.fromkeys(name for dataset in datasets for name in order_groups(dataset))
    groups = [name for name in known if name in present and name != OTHER] + [OTHER] * (OTHER in present)
    return [] if groups == [OTHER] else groups


def _group(row: Row) -> str:
    return find_type(row.type, row.dataset).group


def _floor(rows: Sequence[Row]) -> float | None:
    floor = measure_floor(rows)
    return None if math.isnan(floor) else round(floor, 4)


def _point(delay: float, scores: Mapping[str, Sequence[bool]]) -> dict[str, Any]:
    accuracy = Accuracy(sum(map(sum, scores.values())), sum(map(len, scores.values())))
    lows, highs = zip(resample(scores), accuracy.interval, strict=True)
    return {
        "delay_s": delay,
        **accuracy.to_dict(),
        "videos": len(scores),
        "thin": accuracy.n < FEW_QUESTIONS or len(scores) < FEW_VIDEOS,
        # The bootstrap gives no interval to videos that agree, and too narrow a one to few videos.
        "low": round(min(lows), 4),
        "high": round(max(highs), 4),
    }


def _compare(rows: Sequence[Row], groups: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the default memory, or the first one, less each other at its budget, and less the full cache."""
    labels = dict.fromkeys((row.memory, row.budget) for row in rows)
    names = [name for name, _ in labels]
    own = DEFAULT if DEFAULT in names else next(iter(names), "")
    pairs = [
        ((own, budget), other)
        for budget in dict.fromkeys(budget for name, budget in labels if name == own)
        for other in labels
        if other[0] != own and (other[1] == budget or (other[0] == FullConfig.name and names.count(other[0]) == 1))
    ]
    for group in ("all", *groups):
        cells: dict[Any, list[Row]] = {}
        for row in rows:
            if group in ("all", _group(row)):
                cells.setdefault((row.memory, row.budget, row.delay_s), []).append(row)
        for one, other in pairs:
            points = []
            for delay in sorted({delay for *_, delay in cells}):
                difference = compare(cells.get((*one, delay), ()), cells.get((*other, delay), ()))
                if difference is not None:
                    few = difference.n < FEW_QUESTIONS or difference.videos < FEW_VIDEOS
                    points.append({"delay_s": delay, **difference.to_dict(), "thin": few})
            if points:
                yield {
                    "group": group,
                    "memory": own,
                    "budget": one[1],
                    "than": other[0],
                    "than_budget": other[1],
                    "points": points,
                }


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
    tokens_per_step = max(
        (row.tokens_seen * row.stream["fps"] / row.stream.get("frames_per_step", 1)) / row.asked_s
        if row.asked_s
        else 0.0
        for row in rows
    )
    return {
        "model": first.model["name"],
        "dtype": first.model["dtype"],
        "weights_digest": first.model["weights_digest"],
        "frames": first.frames,
        "tokens_per_step": round(tokens_per_step, 1),
        "devices": sorted({row.device for row in rows}),
        "fps": first.stream["fps"],
        "subtitles": len({row.video for row in rows if "subtitles" in row.stream}),
        "max_new_tokens": first.decoding["max_new_tokens"],
        "protocol": first.protocol,
    }


def summarise_benchmark(rows: Sequence[Row]) -> dict[str, Any] | None:
    """Return the facts of a data set beside its accuracies; None if the rows are of none, or of several.

    - `scores`: for every memory, budget and delay, accuracy by the official and by the strict rule, the mean of a
      judge's points, the means that papers print (`Benchmark.means`), and accuracy by the age of the evidence, if it is
      known.
    - `constant`: the best single answer to all questions.
    - `judges`: number of answers that each judge decided.
    """
    names = {row.dataset for row in rows}
    if len(names) != 1 or not names <= BENCHMARKS.keys():
        return None
    benchmark = BENCHMARKS[names.pop()]
    answer, right = find_constant(rows)
    types = {(row.video, row.question_id): row.type for row in rows}
    by_type = _shares(count_right((types[question], hit) for question, hit in right.items()))
    by_group = _shares(
        count_right((find_type(types[question], benchmark.name).group, hit) for question, hit in right.items())
    )
    cells: dict[tuple[str, int, float], list[Row]] = {}
    for row in rows:
        cells.setdefault((row.memory, row.budget, row.delay_s), []).append(row)
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
            "types": _round(by_type),
            "means": _round(benchmark.means(by_type)),
        },
        "scores": [
            {"memory": memory, "budget": budget, "delay_s": delay, **_score(own)}
            for (memory, budget, delay), own in cells.items()
        ],
    }


def _score(rows: Sequence[Row]) -> dict[str, Any]:
    benchmark = BENCHMARKS[rows[0].dataset]
    points = [row.points for row in rows if row.points is not None]
    return {
        "n": len(rows),
        "videos": len({row.video for row in rows}),
        "official": round(sum(row.correct for row in rows) / len(rows), 4),
        "strict": round(sum(map(_strict, rows)) / len(rows), 4),
        "points": round(sum(points) / len(points), 3) if points else None,
        "judged": len(points),
        "means": {
            "official": _round(benchmark.means(_shares(count_right((row.type, row.correct) for row in rows)))),
            "strict": _round(benchmark.means(_shares(count_right((row.type, _strict(row)) for row in rows)))),
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
