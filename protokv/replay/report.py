"""What came of a replay, as plain numbers: accuracy against delay, by type, and what it cost. Knows no terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from protokv.replay.metrics import Accuracy, measure_accuracy, measure_floor, quantile
from protokv.replay.question_types import GROUPS, find_type
from protokv.replay.rows import Row


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """The whole report, plain JSON.

    `curves` has one entry per memory and budget with its accuracy at every delay, over all questions, by group and by
    type; `costs` what it cost; `reference` how many questions count their delay from the evidence and how many from the
    query time; `floor` and `floors` the accuracy of always giving the most frequent answer of a question's type;
    `setup` which model answered, where and how.
    """
    labels = list(dict.fromkeys((row.memory, row.budget) for row in rows))
    delays = sorted({row.delay_s for row in rows})
    overall = measure_accuracy(rows, lambda row: (row.memory, row.budget, row.delay_s))
    grouped = measure_accuracy(rows, lambda row: (row.memory, row.budget, row.delay_s, find_type(row.type).group))
    typed = measure_accuracy(rows, lambda row: (row.memory, row.budget, row.delay_s, row.type))
    questions = {(row.video, row.question_id): row for row in rows}
    groups = [
        name for name in (*GROUPS, "other") if any(find_type(row.type).group == name for row in questions.values())
    ]
    if groups == ["other"]:
        # The same as all questions.
        groups = []
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
        "floors": {
            "groups": {
                name: _number(measure_floor([r for r in rows if find_type(r.type).group == name])) for name in groups
            },
            "types": {name: _number(measure_floor([r for r in rows if r.type == name])) for name in types},
        },
        "setup": _describe_setup(rows),
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
    """A group or type as a heading: `all questions`, `which first`."""
    return f"{name} questions" if name in ("all", "other", *GROUPS) else name.replace("_", " ") or "without a type"


def _number(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 4)
