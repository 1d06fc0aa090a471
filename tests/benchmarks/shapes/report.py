"""What a run found, as JSON and as tables: rows, the machine, and in words what was not measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from protokv.config import MemoryConfig
from tests.benchmarks.shapes.models import Shape
from tests.benchmarks.shapes.stages import Measured
from tests.benchmarks.shapes.timing import Stopwatch, distribution
from tests.benchmarks.shapes.work import Peak, Work

# What a model of all layers takes as many times as long for as it has more of them, but for its head.
_PER_LAYER = ("forward", "update", "update: plan", "update: merge", "context", "first token", "per token")
NOT_MEASURED = "not measured"
# Columns of the summary.
_SHOWN = ("step behind the tower", "forward", "update", "context", "first token", "per token", "commit")


def rows_of(
    config: MemoryConfig, measured: Measured, work: dict[str, Work], peak: Peak, whole: Shape, cut: Shape
) -> list[dict[str, Any]]:
    """A row for each stage of one memory."""
    about = {"memory": config.name, "budget": config.budget}
    rows = [about | row for row in stage_rows(measured.stopwatch, work, peak)]
    for row in rows:
        factor = whole.layers / cut.layers if row["stage"] in _PER_LAYER else None
        if whole.layers != cut.layers:
            row["computed_ms"] = None if factor is None else round(row["median_ms"] * factor, 1)
    return rows


def stage_rows(stopwatch: Stopwatch, work: dict[str, Work], peak: Peak) -> list[dict[str, Any]]:
    """Distribution, work and the share of the peak; None where there is no arithmetic for a stage."""
    rows = []
    for stage, times in stopwatch.times.items():
        row: dict[str, Any] = {"stage": stage} | distribution(times)
        given = work.get(stage)
        row["gflop"] = None if given is None else round(given.flop / 1e9, 3)
        row["mbytes"] = None if given is None else round(given.bytes / 1e6, 2)
        # A stage that did nothing in most rounds reaches no share.
        known = given is not None and row["median_ms"] > 0
        row["share_of_peak"] = (
            round(peak.least_ms(given) / row["median_ms"], 3) if given is not None and known else None
        )
        row["peak_mb"] = round(stopwatch.peaks[stage] / 1e6, 1) if stage in stopwatch.peaks else NOT_MEASURED
        rows.append(row)
    return rows


def summary_rows(document: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each memory and budget: the medians of its stages in milliseconds, the update's worst round too, and
    the bytes of a state of the whole model."""
    stages = {(row["memory"], row["budget"], row["stage"]): row for row in document["stages"]}
    states = {(row["memory"], row["budget"]): row["mb"] for row in document.get("states", ())}
    rows = []
    for memory, budget in dict.fromkeys((held["memory"], held["budget"]) for held in document["held"]):
        found = {stage: stages[memory, budget, stage] for stage in _SHOWN}
        row = {"memory": memory, "budget": budget} | {name: _short(found[name]["median_ms"]) for name in _SHOWN}
        worst = _short(found["update"]["worst_ms"])
        rows.append(row | {"update, worst": worst, "state, MB": states.get((memory, budget))})
    return sorted(rows, key=lambda row: int(row["budget"]))


def _short(milliseconds: float) -> float:
    """Three digits or more."""
    return round(milliseconds) if milliseconds >= 100 else round(milliseconds, 1 if milliseconds >= 10 else 2)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown, in columns that line up."""
    if not rows:
        return "none\n"
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [columns, *(["" if (v := row.get(c)) is None else str(v) for c in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    numbers = [any(isinstance(row.get(c), int | float) for row in rows) for c in columns]
    head, *lines = (
        "| " + " | ".join(c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numbers, strict=True)) + " |"
        for row in cells
    )
    rule = "|" + "|".join("-" * (w + 1) + (":" if n else "-") for w, n in zip(widths, numbers, strict=True)) + "|"
    return "\n".join([head, rule, *lines]) + "\n"


def summary(document: dict[str, Any]) -> str:
    """What a terminal shows of a run: the medians, and what had no figure."""
    parts = ["Medians, ms (see the notes of the file)", table(summary_rows(document))]
    if document["withheld"]:
        parts += ["Withheld", table(document["withheld"])]
    return "\n".join(parts)


def write(folder: Path, name: str, document: dict[str, Any]) -> str:
    """`NAME.json` and `NAME.md`; returns the second's text."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    machine = document["machine"] | {"most resident memory of the process, MB": document["resident_peak_mb"]}
    parts = [", ".join(f"{key} {value}" for key, value in machine.items()) + ".", *document["notes"]]
    if "unfinished" in document:
        parts.insert(0, "UNFINISHED: the run is still going on or was cut short; `--resume` goes on with it.")
    parts += ["## Medians, ms", table(summary_rows(document)).rstrip()]
    for title in ("stages", "held", "withheld", "counts", "states"):
        if document.get(title):
            parts += [f"## {title.capitalize()}", table(document[title]).rstrip()]
    text = "\n\n".join(parts) + "\n"
    (folder / f"{name}.md").write_text(text)
    return text
