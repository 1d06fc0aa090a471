"""What `protokv replay` shows: progress while it runs, tables or JSON of what came of it, figures."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from protokv.backbones.base import Backbone
from protokv.errors import ConfigError, ProtoKVError
from protokv.replay.dataset import Opened
from protokv.replay.judges import Judge, judge_rows
from protokv.replay.plan import Unread
from protokv.replay.presets import PRESETS
from protokv.replay.report import format_delay, format_group, summarise
from protokv.replay.request import Request
from protokv.replay.rows import Row, RowFile
from protokv.replay.runner import Watched
from protokv_cli.bar import Bar, left_text
from protokv_cli.benchmark_tables import tabulate_benchmark
from protokv_cli.output import Format, Output
from protokv_cli.tables import bytes_text, count_text, grid, pairs, time_text


@contextmanager
def following(
    out: Output, answers: int, unread: MutableMapping[str, str]
) -> Iterator[Callable[[Row | Watched | Unread], None]]:
    """A function that takes each event of a replay and shows how far it is, on stderr.

    Videos that cannot be read to their end are told at once and added to `unread`.
    """
    bar, given, began_s = Bar(out, f"0 of {answers} answers"), 0, time.monotonic()

    def follow(event: Row | Watched | Unread) -> None:
        nonlocal given
        if isinstance(event, Unread):
            unread[event.video] = event.why
            out.warn(f"left out: {event.video}: {event.why}")
        elif isinstance(event, Row):
            given += 1
        elif bar.due():
            left = left_text(given, answers - given, time.monotonic() - began_s)
            where = f"{event.video} {time_text(event.stream_time_s)} / {time_text(event.length_s)}"
            bar.show([f"{given} of {answers} answers", *left, where], given, answers)

    try:
        yield follow
    finally:
        bar.stop()


def judging(out: Output, results: RowFile, keys: Sequence[str], judge: Judge, should_stop: Callable[[], bool]) -> None:
    """Have open answers judged, and say of how many there is no verdict."""
    without = 0
    for row in judge_rows(results, keys, judge):
        without += row is None
        if should_stop():
            return
    if without:
        out.warn(f"{without} answers have no verdict of {judge.label}; run the same command again to ask for them")


def show_cost(out: Output, cost: Mapping[str, Any], opened: Opened) -> None:
    """A dry run."""
    if out.format is Format.JSON:
        out.json({"type": "plan", **cost, "missing": opened.missing, "notes": dict(opened.notes)})
        return
    rows = {name: cost[name] for name in ("videos", "memories", "questions", "hours", "steps", "answers")}
    if cost["estimate_s"] is not None:
        rows["estimate, at least"] = time_text(round(cost["estimate_s"]))
    rows |= {f"left out, {why}": n for why, n in cost["dropped"].items()}
    rows |= {f"left out, video {name}": why for name, why in opened.missing.items()}
    rows |= dict(opened.notes)
    out.table(pairs(rows, title="would be done: steps to encode and answers to give, over all memories"))


def show_preset(out: Output, name: str, request: Request, backbone: Backbone, fps: float | None) -> None:
    """What each data set of a table would take; one that is not there is named as missing."""
    preset = PRESETS[name]
    rows = []
    for cell in preset.cells:
        own = replace(request, dataset=cell.dataset)
        row: dict[str, Any] = {
            "dataset": cell.dataset,
            "budgets": list(request.budgets or cell.budgets),
            "compared": list(dict.fromkeys(variant.label for variant in cell.variants(request.budgets))),
            "delays_s": list(request.delays_s or cell.delays_s),
        }
        try:
            own.check()
            opened = own.open(backbone.identity.name)
            plan = own.plan(opened, backbone, fps)
            row |= own.cost(plan, backbone) | {"fps": plan.setup.fps, "missing": opened.missing}
        except ProtoKVError as error:
            row["absent"] = error.message
        rows.append(row)
    if out.format is Format.JSON:
        out.json({"type": "preset", "study": name, "title": preset.title, "models": list(preset.models), "cells": rows})
        return
    cells = (
        (
            row["dataset"],
            ", ".join(map(str, row["budgets"])),
            len(row["compared"]),
            *(
                ["-"] * 4
                if "absent" in row
                else [
                    row["videos"],
                    row["questions"],
                    row["hours"],
                    "-" if row["estimate_s"] is None else time_text(round(row["estimate_s"])),
                ]
            ),
        )
        for row in rows
    )
    head = ["data set", "budgets", "memories", "videos", "questions", "hours", "estimate, at least"]
    out.table(grid(head, cells, title=f"{name}: {preset.title}, in the paper by {', '.join(preset.models)}"))
    for row in rows:
        if "absent" in row:
            out.warn(f"{row['dataset']}: {row['absent']}")
        out.note(f"{row['dataset']}: {', '.join(row['compared'])}; and the baselines")


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
