"""The report of a replay, as plain JSON values: accuracies, differences, costs, and facts of a benchmark."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from protokv.memories import DEFAULT, FullConfig
from protokv.replay.benchmarks import BENCHMARKS, find_group
from protokv.replay.benchmarks.base import OTHER
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
from protokv.replay.rows import Row

GroupOf = Callable[[str, str], str]
"""The group of a type of questions in a data set."""


def summarise(rows: Sequence[Row], group: GroupOf = find_group) -> dict[str, Any]:
    """Return the whole report.

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
    types = sorted({row.type for row in rows})
    groups = {row.type: group(row.type, row.dataset) for row in rows}
    names = _order_groups(rows, groups)
    scores: dict[Any, dict[str, list[bool]]] = {}
    for row in rows:
        key = (row.memory, row.budget, row.delay_s)
        for part in ("all", ("group", groups[row.type]), ("type", row.type)):
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
                "groups": {name: points(memory, budget, ("group", name)) for name in names},
                "types": {name: points(memory, budget, ("type", name)) for name in types},
            }
        )
        costs.append(label | _cost([row for row in rows if (row.memory, row.budget) == (memory, budget)]))
    references = Counter(row.reference for row in questions.values())
    return {
        "videos": len({row.video for row in rows}),
        "questions": len(questions),
        "reference": dict(sorted(references.items())),
        "floor": _floor(rows),
        "floors": {
            "groups": {name: _floor([row for row in rows if groups[row.type] == name]) for name in names},
            "types": {name: _floor([row for row in rows if row.type == name]) for name in types},
        },
        "benchmark": summarise_benchmark(rows),
        "setup": _describe_setup(rows),
        "delays_s": delays,
        "curves": curves,
        "differences": list(_compare(rows, groups, names)),
        "costs": costs,
    }


def _order_groups(rows: Sequence[Row], groups: Mapping[str, str]) -> list[str]:
    """Return the groups in the order of the data set, `OTHER` last; none if all questions are of the group `OTHER`."""
    datasets = dict.fromkeys(row.dataset for row in rows)
    known = [kind.group for dataset in datasets if dataset in BENCHMARKS for kind in BENCHMARKS[dataset].types]
    present = set(groups.values())
    found = [name for name in dict.fromkeys((*known, *groups.values())) if name in present and name != OTHER]
    return found + [OTHER] * (OTHER in present) if found else []


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


def _compare(rows: Sequence[Row], groups: Mapping[str, str], names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the default memory, or the first one, less each other at its budget, and less the full cache."""
    labels = dict.fromkeys((row.memory, row.budget) for row in rows)
    memories = [name for name, _ in labels]
    own = DEFAULT if DEFAULT in memories else next(iter(memories), "")
    pairs = [
        ((own, budget), other)
        for budget in dict.fromkeys(budget for name, budget in labels if name == own)
        for other in labels
        if other[0] != own and (other[1] == budget or (other[0] == FullConfig.name and memories.count(other[0]) == 1))
    ]
    for part in ("all", *names):
        cells: dict[Any, list[Row]] = {}
        for row in rows:
            if part in ("all", groups[row.type]):
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
                    "group": part,
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
      judge's points, and the means that papers print (`Benchmark.means`).
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
        count_right((benchmark.find_type(types[question]).group, hit) for question, hit in right.items())
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
    }


def _strict(row: Row) -> bool:
    return row.correct if row.strict is None else row.strict


def _shares(found: Mapping[str, Accuracy]) -> dict[str, float]:
    return {name: accuracy.share for name, accuracy in found.items()}


def _round(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in values.items()}
