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


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    if not rows:
        return "none\n"
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [
        "| " + " | ".join(columns) + " |",
        "|" + "---|" * len(columns),
        *("| " + " | ".join("" if (v := row.get(c)) is None else str(v) for c in columns) + " |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def write(folder: Path, name: str, document: dict[str, Any]) -> str:
    """`NAME.json` and `NAME.md`; returns the second's text."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    machine = document["machine"] | {"most resident memory of the process, MB": document["resident_peak_mb"]}
    parts = [", ".join(f"{key} {value}" for key, value in machine.items()) + ".", *document["notes"]]
    for title in ("stages", "held", "withheld", "counts", "states"):
        if document.get(title):
            parts += [f"## {title.capitalize()}", table(document[title]).rstrip()]
    text = "\n\n".join(parts) + "\n"
    (folder / f"{name}.md").write_text(text)
    return text
