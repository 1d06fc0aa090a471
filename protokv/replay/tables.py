"""The report of a replay as one table of text, and as one CSV file."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

from protokv.errors import ConfigError
from protokv.memories import FullConfig
from protokv.replay.metrics import FEW_QUESTIONS, FEW_VIDEOS
from protokv.replay.report import REPORT_COLUMNS, ReplayReport

REPORT_NOTE: Final = (
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
    judged = any(point.get("points") is not None for point in report["points"])
    cells: dict[tuple[Any, ...], dict[float, Mapping[str, Any]]] = {}
    for point in report["points"]:
        if point["part"] != "type":
            cells.setdefault((point["name"], point["memory"], point["budget"]), {})[
                point["delay_s"]
            ] = point
    order = ["all", *report["groups"]]
    head = ["questions", "memory", "budget", "n", *map(format_delay, delays), "difference"]
    head += [*(["points"] if judged else []), "first token ms", "step ms", "KiB"]
    rows = []
    for label, points in sorted(cells.items(), key=lambda cell: order.index(cell[0][0])):
        last = points[max(points)]
        row = [
            *_format_label(*label),
            "/".join(dict.fromkeys(str(point["n"]) for point in points.values())),
        ]
        row += [_format_accuracy(points[delay]) if delay in points else "-" for delay in delays]
        row.append(_format_difference(last))
        row += ["-" if last.get("points") is None else f"{last['points']:.2f}"] if judged else []
        row += [
            f"{last['ttft_ms_median']:.1f}",
            f"{last['step_ms']:.1f}",
            f"{last['state_bytes'] / 1024:,.0f}",
        ]
        rows.append(row)
    for mean in report["means"]:
        row = [*_format_label(mean["name"], mean["memory"], mean["budget"]), str(mean["n"])]
        row += [f"{mean['official']:.1%}" if delay == mean["delay_s"] else "" for delay in delays]
        rows.append(row)
    return [dict(zip_longest(head, row, fillvalue="")) for row in rows]


def save_report_points(report: ReplayReport, path: str | Path) -> None:
    """Write every point, by `REPORT_COLUMNS`. ConfigError: the file cannot be written."""
    try:
        with Path(path).open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, REPORT_COLUMNS)
            writer.writeheader()
            writer.writerows(report["points"])
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error}", hint="name a file in a folder of yours"
        ) from error


def _format_label(name: str, memory: str, budget: int) -> list[str]:
    """Return the first cells of a row; the full cache keeps all tokens, whatever was asked for."""
    return [name, memory, "all" if memory == FullConfig.name else str(budget)]


def _format_accuracy(point: Mapping[str, Any]) -> str:
    mark = "*" if point["thin"] else ""
    return f"{point['accuracy']:.0%} {100 * point['low']:.0f}-{100 * point['high']:.0f}{mark}"


def _format_difference(point: Mapping[str, Any]) -> str:
    if "than" not in point:
        return ""
    share, low, high = (
        100 * point[name] for name in ("difference", "difference_low", "difference_high")
    )
    return f"{share:+.0f} {low:+.0f}..{high:+.0f}{'*' if point['thin'] else ''} to {point['than']}"
