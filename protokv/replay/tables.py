"""The report of a replay as one table of text, and as one CSV file."""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path

from protokv.errors import ConfigError
from protokv.memories import FullConfig
from protokv.replay.metrics import FEW_QUESTIONS, FEW_VIDEOS
from protokv.replay.report import ReplayReport
from protokv.texts import JsonRecord

REPORT_NOTE = (
    "Right answers and their 95% interval. Difference: in points, at the longest delay, on the "
    "same questions; it may "
    f"be chance if the interval contains 0. *: fewer than {FEW_QUESTIONS} questions or "
    f"{FEW_VIDEOS} videos."
)


def format_delay(seconds: float) -> str:
    """Return a delay in its largest whole unit: `0 s`, `90 s`, `2 min`, `1 h`."""
    for unit, name in ((3600, "h"), (60, "min")):
        if seconds and seconds % unit == 0:
            return f"{seconds / unit:g} {name}"
    return f"{seconds:g} s"


def tabulate_report(report: ReplayReport) -> list[dict[str, str]]:
    """Return a table of text, a row after the other with the names of its columns; `REPORT_NOTE`
    says how to read it.

    It has the accuracies at every delay, of all questions and each group, differences, costs, and
    means of a set.
    """
    delays = report["delays_s"]
    judged = any(point["points"] is not None for point in report["points"])
    cells: dict[tuple[str, str, int], dict[float, JsonRecord]] = defaultdict(dict)
    for name in ("all", *report["groups"]):
        for point in report["points"]:
            if point["name"] == name and point["part"] != "type":
                cells[name, point["memory"], point["budget"]][point["delay_s"]] = point
    rows = []
    for (name, memory, budget), points in cells.items():
        last = points[max(points)]
        n = "/".join(dict.fromkeys(str(point["n"]) for point in points.values()))
        row = _label_row(name, memory, budget, n)
        for delay in delays:
            row[format_delay(delay)] = _format_accuracy(points[delay]) if delay in points else "-"
        row["difference"] = _format_difference(last)
        if judged:
            row["points"] = "-" if last["points"] is None else f"{last['points']:.2f}"
        row["first token ms"] = f"{last['ttft_ms_median']:.1f}"
        row["step ms"] = f"{last['step_ms']:.1f}"
        row["KiB"] = f"{last['state_bytes'] / 1024:,.0f}"
        rows.append(row)
    for mean in report["means"]:
        row = _label_row(mean["name"], mean["memory"], mean["budget"], str(mean["n"]))
        rows.append(row | {format_delay(mean["delay_s"]): f"{mean['official']:.1%}"})
    return [{name: row.get(name, "") for name in rows[0]} for row in rows]


def save_report_points(report: ReplayReport, path: str | Path) -> None:
    """Write every point with all of its values. ConfigError: the file cannot be written."""
    try:
        with Path(path).open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, report["points"][0])
            writer.writeheader()
            writer.writerows(report["points"])
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error}", hint="name a file in a folder of yours"
        ) from error


def _label_row(name: str, memory: str, budget: int, n: str) -> dict[str, str]:
    """Begin a row; the full cache keeps all tokens, whatever was asked for."""
    kept = "all" if memory == FullConfig.name else str(budget)
    return {"questions": name, "memory": memory, "budget": kept, "n": n}


def _format_accuracy(point: JsonRecord) -> str:
    bounds = f"{100 * point['low']:.0f}-{100 * point['high']:.0f}"
    return f"{point['accuracy']:.0%} {bounds}{'*' * point['thin']}"


def _format_difference(point: JsonRecord) -> str:
    if point["than"] is None:
        return ""
    names = ("difference", "difference_low", "difference_high")
    share, low, high = (f"{100 * point[name]:+.0f}" for name in names)
    return f"{share} {low}..{high}{'*' * point['thin']} to {point['than']}"
