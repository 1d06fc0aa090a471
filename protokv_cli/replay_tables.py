"""What came of a replay: tables or JSON, figures and a page."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from protokv.errors import ConfigError
from protokv.replay.report import format_delay, format_group, summarise
from protokv.replay.rows import Row
from protokv_cli.benchmark_tables import tabulate_benchmark
from protokv_cli.output import Format, Output
from protokv_cli.tables import bytes_text, count_text, grid, pairs


def show(
    out: Output,
    rows: Sequence[Row],
    *,
    dropped: Mapping[str, int] | None = None,
    plot: Path | None = None,
    html: Path | None = None,
    missing: Mapping[str, str] | None = None,
    notes: Mapping[str, int] | None = None,
) -> None:
    """Tables on a terminal, one JSON document in a pipe, and the figures that were asked for."""
    if not rows:
        reasons = "; ".join(f"{n} {why}" for why, n in (dropped or {}).items())
        raise ConfigError(
            f"there is nothing to show: no question could be asked ({reasons or 'none was there'})",
            hint="try shorter --delays, a longer stream, --no-intersection, or --types all",
        )
    report = summarise(rows)
    if dropped is not None:
        report["dropped"] = dict(dropped)
    if missing or report["benchmark"]:
        report["missing"], report["notes"] = dict(missing or {}), dict(notes or {})
    if out.format is Format.JSON:
        out.json(report)
    else:
        for table in _tables(report):
            out.table(table, "")
    if plot:
        from protokv.replay.figure import save_figure

        save_figure(report, plot)
        out.note(f"figure: {plot}")
    if html:
        from protokv.replay.page import save_page

        save_page(report, html, made=datetime.now().astimezone(), command=shlex.join(["protokv", *sys.argv[1:]]))
        out.note(f"page: {html}")


def _tables(report: Mapping[str, Any]) -> Iterator[Any]:
    references = ", ".join(f"{n} from the {name}" for name, n in report["reference"].items())
    facts = {
        "asked": f"{count_text(report['questions'], 'question')} about {count_text(report['videos'], 'video')}",
        "delay counted": references,
        "floor": f"{report['floor']:.0%}, always the most frequent answer of a type",
    }
    facts |= {f"left out, {why}": str(n) for why, n in report.get("dropped", {}).items()}
    yield pairs(facts)
    if report["benchmark"]:
        yield from tabulate_benchmark(report)
    for name in ("all", *report["curves"][0]["groups"]):
        yield grid(
            ["memory", "budget", "state", "ms/step", "n", *(format_delay(delay) for delay in report["delays_s"])],
            (
                (
                    curve["memory"],
                    curve["budget"],
                    bytes_text(cost["state_bytes"]),
                    f"{cost['step_ms']:.1f}",
                    _counts(points),
                    *_cells(points, report),
                )
                for curve, cost in zip(report["curves"], report["costs"], strict=True)
                for points in [curve["all"] if name == "all" else curve["groups"][name]]
            ),
            title=f"accuracy against delay, {format_group(name)} (with 95 % interval)",
        )
    for name in ("all", *report["curves"][0]["groups"]):
        rows = [found for found in report["differences"] if found["group"] == name]
        if rows:
            yield grid(
                ["memory", "budget", "less", "n", *(format_delay(delay) for delay in report["delays_s"])],
                (
                    (
                        row["memory"],
                        row["budget"],
                        f"{row['than']} {row['than_budget']}",
                        _counts(row["points"]),
                        *_differences(row["points"], report),
                    )
                    for row in rows
                ),
                title=f"difference on the same questions, {format_group(name)}, in points (with 95 % interval)",
            )
    yield grid(
        ["memory", "budget", "first", "p95", "answer", "p95", "step", "state", "seen/shown"],
        (
            (
                cost["memory"],
                cost["budget"],
                *(
                    f"{cost[name]:.1f}"
                    for name in ("ttft_ms_median", "ttft_ms_p95", "total_ms_median", "total_ms_p95", "step_ms")
                ),
                bytes_text(cost["state_bytes"]),
                f"{cost['compression']:.1f}",
            )
            for cost in report["costs"]
        ),
        title="cost: ms to the first token, of an answer and of a step (medians, 95th percentiles)",
    )


def _cells(points: Sequence[Mapping[str, Any]], report: Mapping[str, Any]) -> Iterator[str]:
    found = {point["delay_s"]: point for point in points}
    for delay in report["delays_s"]:
        point = found.get(delay)
        marked = "*" if point and point["thin"] and report["benchmark"] else ""
        yield f"{point['accuracy']:.0%} {100 * point['low']:.0f}-{100 * point['high']:.0f}{marked}" if point else "-"


def _differences(points: Sequence[Mapping[str, Any]], report: Mapping[str, Any]) -> Iterator[str]:
    found = {point["delay_s"]: point for point in points}
    for delay in report["delays_s"]:
        point = found.get(delay)
        three = [100 * point[name] for name in ("difference", "low", "high")] if point else []
        yield f"{three[0]:+.0f} {three[1]:+.0f}..{three[2]:+.0f}" if point else "-"


def _counts(points: Sequence[Mapping[str, Any]]) -> str:
    """How many questions each point stands on: one number where it is the same."""
    counts = [point["n"] for point in points]
    return str(counts[0]) if len(set(counts)) == 1 else "/".join(map(str, counts))
