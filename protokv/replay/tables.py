"""The report of a replay as one table of text, and as one CSV file."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from protokv.errors import ConfigError
from protokv.memories import FullConfig
from protokv.replay.metrics import FEW_QUESTIONS, FEW_VIDEOS
from protokv.texts import count_text

Report = Mapping[str, Any]

FEW: Final = "*"
"""A cell that ends so stands on little data."""

_STARTS: Final = {
    "evidence": "the moment when the answer was last visible",
    "query": "the time that the question names",
    "end": "the end of the video",
}
_COSTS: Final = (
    "ttft_ms_median", "ttft_ms_p95", "total_ms_median", "total_ms_p95", "step_ms", "context_tokens", "state_bytes",
    "compression",
)  # fmt: skip
COLUMNS: Final = (
    "part", "name", "memory", "budget", "delay_s", "n", "videos", "accuracy", "low", "high", "thin", "strict", "points",
    "than", "difference", "difference_low", "difference_high", *_COSTS,
)  # fmt: skip
"""Of the CSV file: a row for each part of the questions (all, a group, a type), memory, budget and delay."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text: a name for each column, rows of cells, and a line below it on how to read it."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str


def format_delay(seconds: float) -> str:
    """Return a delay in its largest whole unit: `0 s`, `90 s`, `2 min`, `1 h`."""
    for unit, name in ((3600, "h"), (60, "min")):
        if seconds and seconds % unit == 0:
            return f"{seconds / unit:g} {name}"
    return f"{seconds:g} s"


def list_facts(report: Report) -> dict[str, str]:
    """Return what all numbers of a report depend on, as name -> text."""
    setup, benchmark = report["setup"], report["benchmark"]
    digest = setup["weights_digest"][:12]
    facts = {
        "asked": f"{count_text(report['questions'], 'question')} about {count_text(report['videos'], 'video')}",
        "delay counts from": ", ".join(f"{_STARTS[name]} ({n})" for name, n in report["reference"].items()),
        "without watching": f"{report['floor']:.0%} right, by always the most frequent answer of a type",
        "model": f"{setup['model']}, {setup['dtype']}, " + (f"revision {digest}" if digest else "without a digest"),
        "ran on": ", ".join(setup["devices"]),
        "frames": f"{setup['fps']:g} a second, {setup['tokens_per_step']:g} tokens a step",
        "protocol": str(setup["protocol"]),
    }
    if setup["subtitles"]:
        facts["subtitles"] = (
            f"of {count_text(setup['subtitles'], 'video')}, in the stream at their times and within the budget; "
            "published figures have them in the prompt"
        )
    if benchmark:
        constant = benchmark["constant"]
        facts |= {
            "data set": f"{benchmark['dataset']}, {benchmark['source']} ({benchmark['licence']})",
            "prompt": ", ".join(benchmark["prompt_hash"]),
            "judged by": "; ".join(f"{who} ({n})" for who, n in benchmark["judges"].items()),
            "constant answer": f"{constant['accuracy']:.1%}, always {constant['answer']!r}",
        }
    facts |= {f"left out, {why}": str(n) for why, n in report.get("dropped", {}).items()}
    if report.get("missing"):
        facts["videos left out"] = f"{len(report['missing'])}: {', '.join(report['missing'])}"
    return facts | {note: str(n) for note, n in report.get("notes", {}).items()}


def tabulate(report: Report) -> Table:
    """Return accuracies at every delay, of all questions and of each group, differences, and costs.

    A number on few questions or videos ends in `*`. A benchmark adds its strict score, the points of a judge, and the
    means that papers print.
    """
    own = next((one["memory"] for one in report["differences"]), "")
    groups, benchmark = list(report["curves"][0]["groups"]), report["benchmark"]
    first = report["delays_s"][0]
    scores = {_key(score): score for score in benchmark["scores"]} if benchmark else {}
    costs = {_key(cost): cost for cost in report["costs"]}
    head = ["questions", "memory", "budget", "n", *map(format_delay, report["delays_s"])]
    head += (
        [f"against {own}"] * bool(own) + ["strict", "points"] * bool(benchmark) + ["first token ms", "step ms", "KiB"]
    )
    rows = []
    for part in ["all", *(groups if len(groups) > 1 else [])]:
        for curve in report["curves"]:
            points = {point["delay_s"]: point for point in (curve["all"] if part == "all" else curve["groups"][part])}
            cells = [_format_accuracy(points.get(delay)) for delay in report["delays_s"]]
            if own:
                cells.append(_format_difference(report, part, curve))
            if benchmark:
                score = scores.get((*_key(curve), first), {}) if part == "all" else {}
                cells += [_format(score.get("strict"), "{:.1%}"), _format(score.get("points"), "{:.2f}")]
            cost = costs[_key(curve)]
            cells += [f"{cost['ttft_ms_median']:.1f}", f"{cost['step_ms']:.1f}", f"{cost['state_bytes'] / 1024:,.0f}"]
            counts = "/".join(dict.fromkeys(str(point["n"]) for point in points.values()))
            rows.append([part, *_label(curve), counts, *cells])
    for score in benchmark["scores"] if benchmark else ():
        for name, share in score["means"]["official"].items():
            at = [f"{share:.1%}" if delay == score["delay_s"] else "" for delay in report["delays_s"]]
            cells = [*at, *[""] * bool(own), _format(score["means"]["strict"].get(name), "{:.1%}")]
            rows.append([name, *_label(score), str(score["n"]), *cells, *[""] * 4])
    note = "Right answers and their 95% interval."
    if own:
        note += (
            f" Against {own}: points more or fewer at the longest delay, on the same questions; may be chance if the "
            "interval contains 0."
        )
    return Table(head, rows, f"{note} {FEW}: fewer than {FEW_QUESTIONS} questions or {FEW_VIDEOS} videos.")


def flatten(report: Report) -> Iterator[dict[str, Any]]:
    """Yield the rows of the CSV file, by `COLUMNS`; what is not known is left out."""
    scores = {_key(one): one for one in report["benchmark"]["scores"]} if report["benchmark"] else {}
    costs = {_key(cost): {name: cost[name] for name in _COSTS} for cost in report["costs"]}
    differences = {
        (one["group"], one["than"], one["than_budget"], point["delay_s"]): (one["memory"], point)
        for one in reversed(report["differences"])
        for point in one["points"]
    }
    for curve in report["curves"]:
        label = {"memory": curve["memory"], "budget": curve["budget"]}
        parts = [("all", "all", curve["all"])]
        parts += [(part[:-1], name, points) for part in ("groups", "types") for name, points in curve[part].items()]
        for part, name, points in parts:
            for point in points:
                row = {"part": part, "name": name} | label | point | costs[_key(curve)]
                if part == "all":
                    row |= {key: scores.get(_key(point | label), {}).get(key) for key in ("strict", "points")}
                key = (name, curve["memory"], curve["budget"], point["delay_s"])
                if part != "type" and key in differences:
                    than, found = differences[key]
                    row |= {"than": than, "difference": -found["difference"]}
                    row |= {"difference_low": -found["high"], "difference_high": -found["low"]}
                yield row


def save_csv(report: Report, path: str | Path) -> None:
    """Write the CSV file. ConfigError: it cannot be written."""
    try:
        with Path(path).open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(flatten(report))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}", hint="name a file in a folder of yours") from error


def _key(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return memory and budget, and the delay of a score."""
    return tuple(entry[name] for name in ("memory", "budget", "delay_s") if name in entry)


def _label(entry: Mapping[str, Any]) -> list[str]:
    """Return memory and budget; the full cache keeps all tokens, whatever was asked for."""
    return [entry["memory"], "all" if entry["memory"] == FullConfig.name else str(entry["budget"])]


def _format(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _format_accuracy(point: Mapping[str, Any] | None) -> str:
    if point is None:
        return "-"
    low, high = (f"{100 * point[name]:.0f}" for name in ("low", "high"))
    return f"{point['accuracy']:.0%} {low}-{high}{FEW if point['thin'] else ''}"


def _format_difference(report: Report, part: str, curve: Mapping[str, Any]) -> str:
    """Return the difference to the memory that all are compared with, at the longest common delay."""
    for one in report["differences"]:
        if (one["group"], one["than"], one["than_budget"]) == (part, curve["memory"], curve["budget"]):
            point = one["points"][-1]
            share, low, high = (0.0 - 100 * point[name] for name in ("difference", "high", "low"))
            return f"{share:+.0f} {low:+.0f}..{high:+.0f}{FEW if point['thin'] else ''}"
    return ""
