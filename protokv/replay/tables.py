"""The tables of a report: titles, headings and cells as text, for a terminal and for a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from protokv.memories import FullConfig
from protokv.replay.metrics import FEW_QUESTIONS, FEW_VIDEOS
from protokv.texts import count_text

Report = Mapping[str, Any]

FEW: Final = "*"
"""A cell that ends so stands on little data."""
FEW_NOTE: Final = f"{FEW}: fewer than {FEW_QUESTIONS} questions or {FEW_VIDEOS} videos"


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text.

    Attributes:
        title: above it.
        head: a name for each column.
        rows: cells; the first of each row is its name.
        note: below it, how to read it.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def format_delay(seconds: float) -> str:
    """Return a delay in its largest whole unit: `0 s`, `90 s`, `2 min`, `1 h`."""
    for unit, name in ((3600, "h"), (60, "min")):
        if seconds and seconds % unit == 0:
            return f"{seconds / unit:g} {name}"
    return f"{seconds:g} s"


def list_names(names: Sequence[str]) -> str:
    """Return names as text: `a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


_STARTS: Final = {
    "evidence": "the moment when the answer was last visible",
    "query": "the time that the question names",
    "end": "the end of the video",
}


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
        "frames": f"{setup['fps']:g} a second; {_format_pixels(setup['frames'])}; "
        f"{setup['tokens_per_step']:g} tokens a step",
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


def _format_pixels(frames: Mapping[str, Any]) -> str:
    if "frame_tokens" in frames:
        return f"{frames['frame_tokens']} tokens a frame at most"
    if "max_pixels" in frames:
        return f"{frames['min_pixels']} to {frames['max_pixels']} pixels a frame"
    return "pixels a frame as the model has them"


def list_groups(report: Report) -> list[str]:
    """Return the groups that are shown beside all questions: none if all questions are of one."""
    groups = list(report["curves"][0]["groups"])
    return groups if len(groups) > 1 else []


def tabulate(report: Report) -> Iterator[Table]:
    """Yield scores of a benchmark, accuracies by group, differences and costs.

    A number on few questions or videos ends in `*`, and the note of its table says so.
    """
    if report["benchmark"]:
        yield from _tabulate_benchmark(report)
    delays = [format_delay(delay) for delay in report["delays_s"]]
    groups = ["all", *list_groups(report)]
    for name in groups:
        rows = []
        for curve in report["curves"]:
            points = curve["all"] if name == "all" else curve["groups"][name]
            rows.append([*_label(curve), _count(points), *_cells(report, points, _format_accuracy)])
        head = ["memory", "budget", "n", *delays]
        yield Table(f"accuracy against delay, {name} questions (with 95% interval)", head, rows, _note(rows))
    for name in groups:
        found = [difference for difference in report["differences"] if difference["group"] == name]
        rows = [
            [
                difference["than"],
                str(difference["budget"]),
                _count(difference["points"]),
                *_cells(report, difference["points"], _format_difference),
            ]
            for difference in found
        ]
        if rows:
            own = found[0]["memory"]
            title = f"{own} compared with the others, {name} questions: points more or fewer (with 95% interval)"
            note = f"On the same questions. A difference whose interval contains 0 may be chance. {_note(rows)}".strip()
            yield Table(title, ["than", "budget", "n", *delays], rows, note)
    times = ("ttft_ms_median", "ttft_ms_p95", "total_ms_median", "total_ms_p95", "step_ms")
    yield Table(
        "costs: milliseconds, and the size of the state",
        ["memory", "budget", "first token", "p95", "answer", "p95", "step", "state, KiB", "compression"],
        [
            [
                *_label(cost),
                *(f"{cost[name]:.1f}" for name in times),
                _format_bytes(cost["state_bytes"]),
                f"{cost['compression']:.1f}",
            ]
            for cost in report["costs"]
        ],
        "First token, whole answer and one step of watching: medians, and 95th percentiles (p95). "
        "Compression: tokens of the video for each token that a question reads.",
    )


def _tabulate_benchmark(report: Report) -> Iterator[Table]:
    """Yield scores, with the floors as rows among the memories, then types, means and ages of evidence."""
    benchmark, constant = report["benchmark"], report["benchmark"]["constant"]
    always = f"always {constant['answer']!r}"
    contexts = {(cost["memory"], cost["budget"]): str(cost["context_tokens"]) for cost in report["costs"]}
    asked = [str(report["questions"]), str(report["videos"])]
    floors = [(always, constant["accuracy"]), ("most frequent answer of a type", report["floor"])]
    rows = [[name, *"----", *asked, _share(share), "-", "-"] for name, share in floors]
    for score in benchmark["scores"]:
        rows.append(
            [
                *_label(score),
                contexts[score["memory"], score["budget"]],
                f"{report['setup']['fps']:g}",
                format_delay(score["delay_s"]),
                str(score["n"]),
                str(score["videos"]),
                f"{score['official']:.1%} {_interval(report, score)}",
                _share(score["strict"]),
                "-" if score["points"] is None else f"{score['points']:.2f}",
            ]
        )
    yield Table(
        f"{benchmark['dataset']}: scores (95% interval; {FEW_NOTE})",
        ["memory", "budget", "context", "fps", "delay", "n", "videos", "official", "strict", "points"],
        rows,
    )
    types, first = list(report["curves"][0]["types"]), report["delays_s"][0]
    rows = [
        [always, "-", *(_share(constant["types"].get(name, 0)) for name in types)],
        ["most frequent", "-", *(_share(report["floors"]["types"][name]) for name in types)],
    ]
    for curve in report["curves"]:
        points = [next((p for p in curve["types"][name] if p["delay_s"] == first), None) for name in types]
        rows.append([*_label(curve), *("-" if p is None else f"{p['accuracy']:.1%} ({p['n']})" for p in points)])
    yield Table(f"by type, at {format_delay(first)} (n)", ["memory", "budget", *types], rows)
    names = list(dict.fromkeys(name for score in benchmark["scores"] for name in score["means"]["official"]))
    if names:
        rows = [[always, "-", "-", *(_share(constant["means"].get(name)) for name in names)]]
        for score in benchmark["scores"]:
            pairs = [(score["means"]["official"].get(name), score["means"]["strict"].get(name)) for name in names]
            cells = [f"{_share(official)} / {_share(strict)}" for official, strict in pairs]
            rows.append([*_label(score), format_delay(score["delay_s"]), *cells])
        yield Table("means that papers print (official / strict)", ["memory", "budget", "delay", *names], rows)
    borders = sorted({(age["from_s"], age["to_s"]) for score in benchmark["scores"] for age in score["ages"]})
    if borders:
        head = [f"{low:g} s or more" if high is None else f"{low:g} to {high:g} s" for low, high in borders]
        rows = []
        for score in benchmark["scores"]:
            ages = {(age["from_s"], age["to_s"]): f"{age['accuracy']:.0%} ({age['n']})" for age in score["ages"]}
            cells = [ages.get(border, "-") for border in borders]
            rows.append([*_label(score), format_delay(score["delay_s"]), *cells])
        yield Table("by the age of the evidence (n)", ["memory", "budget", "delay", *head], rows)


def _label(entry: Mapping[str, Any]) -> list[str]:
    return [entry["memory"], _tokens(entry["memory"], entry["budget"])]


def _tokens(memory: str, budget: int) -> str:
    """Return a budget; the full cache keeps all tokens, whatever was asked for."""
    return "all" if memory == FullConfig.name else str(budget)


def _note(rows: Sequence[Sequence[str]]) -> str:
    return FEW_NOTE if any(cell.endswith(FEW) for row in rows for cell in row) else ""


def _interval(report: Report, score: Mapping[str, Any]) -> str:
    """Return the interval of a score, which is that of the point on its curve."""
    for curve in report["curves"]:
        if (curve["memory"], curve["budget"]) == (score["memory"], score["budget"]):
            for point in curve["all"]:
                if point["delay_s"] == score["delay_s"]:
                    return f"{100 * point['low']:.0f}-{100 * point['high']:.0f}{FEW if point['thin'] else ''}"
    return ""


def _cells(report: Report, points: Sequence[Mapping[str, Any]], write: Any) -> list[str]:
    """Write the point at each delay of the report, or a dash."""
    found = {point["delay_s"]: point for point in points}
    return [write(report, found[delay]) if delay in found else "-" for delay in report["delays_s"]]


def _format_accuracy(report: Report, point: Mapping[str, Any]) -> str:
    mark = FEW if point["thin"] else ""
    return f"{point['accuracy']:.0%} {100 * point['low']:.0f}-{100 * point['high']:.0f}{mark}"


def _format_difference(report: Report, point: Mapping[str, Any]) -> str:
    share, low, high = (100 * point[name] for name in ("difference", "low", "high"))
    return f"{share:+.0f} {low:+.0f}..{high:+.0f}{FEW if point['thin'] else ''}"


def _count(points: Sequence[Mapping[str, Any]]) -> str:
    """Return the number of questions of each point, once if all are equal."""
    counts = [str(point["n"]) for point in points]
    return counts[0] if len(set(counts)) == 1 else "/".join(counts)


def _format_bytes(count: int) -> str:
    return f"{count / 1024:,.0f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
