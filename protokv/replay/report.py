"""The report of a replay as plain JSON values: what the numbers depend on, and one flat list of
points.

A point is a part of the questions (all, a group, a type) under a memory at a budget and a delay.
Table, CSV file and figure show the same points.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from protokv.memories import DEFAULT_MEMORY, FullConfig
from protokv.replay.benchmarks import BENCHMARKS, find_question_group
from protokv.replay.benchmarks.base import OTHER_GROUP
from protokv.replay.metrics import (
    FEW_QUESTIONS,
    FEW_VIDEOS,
    bound_share,
    compare_paired,
    score_majority,
)
from protokv.replay.rows import AnswerRow
from protokv.texts import JsonObject, format_count

ReplayReport = Mapping[str, Any]


class _Cell(NamedTuple):
    """The answers to a part of the questions under a memory at a budget and a delay."""

    part: str
    name: str
    memory: str
    budget: int
    delay_s: float


_Cells = Mapping[_Cell, Sequence[AnswerRow]]
_STARTS = {
    "evidence": "the time when the answer was last visible",
    "query": "the time that the question names",
    "end": "the end of the video",
}


def summarise_answers(
    rows: Sequence[AnswerRow], group: Callable[[str, str], str] = find_question_group
) -> JsonObject:
    """Return the report of at least one answer.

    - `facts`: name -> text of everything that the numbers depend on.
    - `videos`, `questions`, `delays_s`, `groups`: what was asked; groups in the order of the data
      set, none if all questions are of one.
    - `floor`, `floors`: accuracy of the most frequent answer of each question's type: of all, and
      by group.
    - `points`: each with all values, or None. `low` and `high` are the wider one of Wilson's
      interval and of a bootstrap over videos; `thin`: few questions or videos. `points` are those
      of a judge. `difference` is the accuracy less that of the memory `than` on the same questions:
      the default memory, or the first one, at the same budget; for that memory itself, the full
      cache.
    - `means`: of a benchmark, the numbers that papers print, for every memory, budget and delay.
    - `recalled`: of questions that were asked both openly and with choices (the text of the one
      stands in the other), how many were remembered (right without choices) and how many only
      recognised (right with them alone).

    `group` returns the group of a type of questions in a data set.
    """
    grouped = {row.type: group(row.type, row.dataset) for row in rows}
    groups = _order_groups(rows, set(grouped.values()))
    floors = {
        name: score_majority([row for row in rows if grouped[row.type] == name]) for name in groups
    }
    cells: dict[_Cell, list[AnswerRow]] = {}
    for row in rows:
        parts = {"all": "all", "type": row.type} | ({"group": grouped[row.type]} if groups else {})
        for part, name in parts.items():
            cell = _Cell(part, name, row.memory, row.budget, row.delay_s)
            cells.setdefault(cell, []).append(row)
    return {
        "facts": _list_facts(rows),
        "videos": len({row.video for row in rows}),
        "questions": len({(row.video, row.question_id) for row in rows}),
        "delays_s": sorted({row.delay_s for row in rows}),
        "groups": groups,
        "floor": round(score_majority(rows), 4),
        "floors": {name: round(floor, 4) for name, floor in floors.items()},
        "points": list(_list_points(cells)),
        "means": list(_list_means(cells)),
        "recalled": list(_list_recalled(cells)),
    }


def _order_groups(rows: Sequence[AnswerRow], present: set[str]) -> list[str]:
    """Return the groups in the order of their data sets, `OTHER_GROUP` at the end; none of one."""
    names = dict.fromkeys(row.dataset for row in rows)
    datasets = [BENCHMARKS[name] for name in names if name in BENCHMARKS]
    known = [kind.group for benchmark in datasets for kind in benchmark.types]
    order = dict.fromkeys((*known, *sorted(present - {OTHER_GROUP}), OTHER_GROUP))
    found = [name for name in order if name in present]
    return found if len(found) > 1 else []


def _list_points(cells: _Cells) -> Iterator[JsonObject]:
    budgets = {cell.memory: cell.budget for cell in cells}
    own = DEFAULT_MEMORY if DEFAULT_MEMORY in budgets else next(iter(budgets))
    full = FullConfig.name
    for cell, rows in cells.items():
        other = cell._replace(memory=own)
        if cell.memory == own:
            other = cell._replace(memory=full, budget=budgets.get(full, 0))
        others = () if cell.memory == full else cells.get(other, ())
        yield (
            cell._asdict()
            | _measure_accuracy(rows)
            | _measure_difference(rows, others)
            | _measure_costs(rows)
        )


def _measure_accuracy(rows: Sequence[AnswerRow]) -> JsonObject:
    scores: dict[str, list[bool]] = {}
    for row in rows:
        scores.setdefault(row.video, []).append(row.correct)
    low, high = bound_share(scores)
    points = [row.points for row in rows if row.points is not None]
    return {
        "n": len(rows),
        "videos": len(scores),
        "accuracy": round(fmean(row.correct for row in rows), 4),
        "low": round(low, 4),
        "high": round(high, 4),
        "thin": len(rows) < FEW_QUESTIONS or len(scores) < FEW_VIDEOS,
        "points": round(fmean(points), 3) if points else None,
    }


def _measure_difference(rows: Sequence[AnswerRow], others: Sequence[AnswerRow]) -> JsonObject:
    found = compare_paired(rows, others)
    if found is None:
        return dict.fromkeys(("than", "difference", "difference_low", "difference_high"))
    return {
        "than": others[0].memory,
        "difference": round(found.share, 4),
        "difference_low": round(found.low, 4),
        "difference_high": round(found.high, 4),
    }


def _measure_costs(rows: Sequence[AnswerRow]) -> JsonObject:
    times = [(row.ttft_ms, row.total_ms, row.step_ms) for row in rows]
    median, p95 = np.quantile(times, (0.5, 0.95), axis=0, method="inverted_cdf").tolist()
    return {
        "ttft_ms_median": median[0],
        "ttft_ms_p95": p95[0],
        "total_ms_median": median[1],
        "total_ms_p95": p95[1],
        "step_ms": median[2],
        "context_tokens": max(row.context_tokens for row in rows),
        "state_bytes": max(row.state_bytes for row in rows),
        "compression": round(max(row.tokens_seen / max(1, row.context_tokens) for row in rows), 2),
    }


def _list_means(cells: _Cells) -> Iterator[JsonObject]:
    for cell, rows in cells.items():
        if cell.part == "all" and rows[0].dataset in BENCHMARKS:
            scores: dict[str, list[bool]] = {}
            for row in rows:
                scores.setdefault(row.type, []).append(row.correct)
            shares = {kind: fmean(found) for kind, found in scores.items()}
            for name, share in BENCHMARKS[rows[0].dataset].means(shares).items():
                yield _label(cell) | {"name": name, "n": len(rows), "official": round(share, 4)}


def _list_recalled(cells: _Cells) -> Iterator[JsonObject]:
    for cell, rows in cells.items():
        # They are kept by video: a cell may have thousands of rows.
        free: dict[str, list[AnswerRow]] = {}
        for row in rows:
            if not row.has_choices:
                free.setdefault(row.video, []).append(row)
        pairs = [
            (row.correct, other.correct)
            for other in rows
            for row in free.get(other.video, ())
            if other.has_choices and row.question in other.asked
        ]
        if cell.part == "all" and pairs:
            yield _label(cell) | {
                "n": len(pairs),
                "remembered": sum(one for one, _ in pairs),
                "recognised": sum(other > one for one, other in pairs),
            }


def _label(cell: _Cell) -> JsonObject:
    return {"memory": cell.memory, "budget": cell.budget, "delay_s": cell.delay_s}


def _list_facts(rows: Sequence[AnswerRow]) -> dict[str, str]:
    first = rows[0]
    questions = {(row.video, row.question_id): row for row in rows}
    starts = Counter(row.reference for row in questions.values())
    videos = {row.video for row in rows}
    with_words = {row.video for row in rows if "subtitles" in row.stream}
    step_s = first.stream.get("frames_per_step", 1) / first.stream["fps"]
    per_step = [row.tokens_seen * step_s / row.asked_s for row in rows if row.asked_s]
    settings = "".join(f", {name} {value}" for name, value in first.frames.items() if name != "fps")
    facts = {
        "asked": (
            f"{format_count(len(questions), 'question')} about {format_count(len(videos), 'video')}"
        ),
        "delay counts from": ", ".join(
            f"{_STARTS[name]} ({n})" for name, n in sorted(starts.items())
        ),
        "without watching": (
            f"{score_majority(rows):.0%} right, by always the most frequent answer of a type"
        ),
        "model": (
            f"{first.model['name']}, {first.model['dtype']}, weights "
            f"{first.model['weights_digest'][:12] or '-'}"
        ),
        "ran on": ", ".join(sorted({row.device for row in rows})),
        "asked at once": f"up to {max(row.at_once for row in rows)}",
        "frames": (
            f"{first.stream['fps']:g} a second, {max(per_step, default=0):.1f} tokens a step"
            f"{settings}"
        ),
    }
    if with_words:
        facts["subtitles"] = (
            f"of {format_count(len(with_words), 'video')}, in the stream and within the budget"
        )
    if first.dataset in BENCHMARKS:
        judges = Counter(row.judge or "the rule of the data set" for row in rows)
        facts |= {
            "data set": f"{first.dataset}, {BENCHMARKS[first.dataset].source}",
            "prompt": ", ".join(sorted({row.prompt_hash for row in rows})),
            "judged by": "; ".join(f"{who} ({n})" for who, n in judges.items()),
        }
    return facts
