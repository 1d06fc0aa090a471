"""What came of a replay, as plain numbers: accuracy against delay, by type, and what it cost. Knows no terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from protokv.replay.metrics import Accuracy, measure_accuracy, measure_floor, quantile
from protokv.replay.rows import Row

GROUPS: Final[dict[str, frozenset[str]]] = {
    "content": frozenset({"colour", "shape", "where", "at", "whether"}),
    "order": frozenset({"first", "which_first", "which_last", "Order Judging(Y/N)", "What event order", "ASI"}),
}
"""Kinds of question that tables set apart: what was there, and in which order. Any other type is "other"."""


def find_group(kind: str) -> str:
    """The group of a question type."""
    return next((name for name, types in GROUPS.items() if kind in types), "other")


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """The whole report, plain JSON.

    `curves` has one entry per memory and budget with its accuracy at every delay, over all questions and by group;
    `costs` what it cost; `reference` how many questions count their delay from the evidence and how many from the
    query time; `floor` the accuracy of always giving the most frequent answer of a question's type.
    """
    labels = list(dict.fromkeys((row.memory, row.budget) for row in rows))
    delays = sorted({row.delay_s for row in rows})
    overall = measure_accuracy(rows, lambda row: (row.memory, row.budget, row.delay_s))
    grouped = measure_accuracy(rows, lambda row: (row.memory, row.budget, row.delay_s, find_group(row.type)))
    typed = measure_accuracy(rows, lambda row: (row.memory, row.budget, row.delay_s, row.type))
    questions = {(row.video, row.question_id): row for row in rows}
    groups = [name for name in (*GROUPS, "other") if any(find_group(row.type) == name for row in questions.values())]
    types = sorted({row.type for row in questions.values()})

    def points(found: dict[Any, Accuracy], *key: str) -> list[dict[str, Any]]:
        return [_point(delay, found[cell]) for delay in delays if (cell := (*label, delay, *key)) in found]

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
        "delays_s": delays,
        "curves": curves,
        "costs": costs,
    }


def _point(delay: float, accuracy: Accuracy) -> dict[str, Any]:
    return {
        "delay_s": delay,
        "n": accuracy.n,
        "accuracy": round(accuracy.share, 4),
        "low": round(accuracy.low, 4),
        "high": round(accuracy.high, 4),
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
        "peak_bytes": max(row.peak_bytes for row in rows),
        "step_ms": round(1e3 * quantile([row.seconds_per_step for row in rows], 0.5), 3),
        "compression": round(max(row.tokens_seen / min(row.tokens_seen, row.budget) for row in rows), 2),
    }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 4)
