"""Tables of a published data set: the protocol that its numbers stand on, scores by both rules, means and floors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from protokv.replay.report import FEW_QUESTIONS, FEW_VIDEOS, format_delay
from protokv_cli.tables import grid, pairs


def tabulate_benchmark(report: Mapping[str, Any]) -> Iterator[Any]:
    """The protocol, then scores; floors are rows among the memories, so that none is read without them."""
    benchmark, setup = report["benchmark"], report["setup"]
    yield pairs(_protocol(report), title=f"{benchmark['dataset']}: protocol")
    constant = benchmark["constant"]
    floors = [
        (f"always {constant['answer'] or 'nothing'!r}", constant["accuracy"], constant["means"]),
        ("most frequent answer of a type", report["floor"], {}),
    ]
    rates = f"{setup['fps']:g}"
    contexts = {(cost["memory"], cost["budget"]): cost["context_tokens"] for cost in report["costs"]}
    yield grid(
        ["memory", "budget", "context", "fps", "delay", "n", "videos", "official", "strict", "points"],
        [
            *((name, "-", "-", "-", "-", report["questions"], report["videos"], f"{share:.1%}", "-", "-")
              for name, share, _ in floors),
            *(
                (
                    score["memory"],
                    score["budget"],
                    contexts[score["memory"], score["budget"]],
                    rates,
                    format_delay(score["delay_s"]),
                    score["n"],
                    score["videos"],
                    f"{score['official']:.1%} {_interval(report, score)}",
                    f"{score['strict']:.1%}",
                    "-" if score["points"] is None else f"{score['points']:.2f}",
                )
                for score in benchmark["scores"]
            ),
        ],
        title=f"scores (95 % interval; *: fewer than {FEW_QUESTIONS} questions or {FEW_VIDEOS} videos)",
    )  # fmt: skip
    yield from _tabulate_types(report)
    yield from _tabulate_means(benchmark)
    yield from _tabulate_ages(benchmark)


def _protocol(report: Mapping[str, Any]) -> dict[str, str]:
    benchmark, setup = report["benchmark"], report["setup"]
    facts = {
        "model": f"{setup['model']}, {setup['dtype']}, revision {setup['weights_digest'][:12] or 'without a digest'}",
        "frames": f"{setup['fps']:g} a second; {_pixels(setup['frames'])}; {setup['tokens_per_step']:g} tokens a step",
        "prompt": ", ".join(benchmark["prompt_hash"]),
        "judged by": "; ".join(f"{who} ({n})" for who, n in benchmark["judges"].items()),
        "annotations": f"{benchmark['source']} ({benchmark['licence']})",
    }
    missing = report.get("missing", {})
    if missing:
        facts["videos left out"] = f"{len(missing)}: {', '.join(missing)}"
    return facts | {note: str(n) for note, n in report.get("notes", {}).items()}


def _pixels(frames: Mapping[str, Any]) -> str:
    if "frame_width" in frames:
        return f"{frames['frame_width']} x {frames['frame_height']} pixels a frame"
    if "max_pixels" in frames:
        return f"{frames['min_pixels']} to {frames['max_pixels']} pixels a frame"
    return "pixels a frame as the model has them"


def _interval(report: Mapping[str, Any], score: Mapping[str, Any]) -> str:
    for curve in report["curves"]:
        if (curve["memory"], curve["budget"]) == (score["memory"], score["budget"]):
            for point in curve["all"]:
                if point["delay_s"] == score["delay_s"]:
                    return f"{100 * point['low']:.0f}-{100 * point['high']:.0f}{'*' if point['thin'] else ''}"
    return ""


def _tabulate_types(report: Mapping[str, Any]) -> Iterator[Any]:
    """Every type at the first delay, with the best single answer as a row of its own."""
    types = list(report["curves"][0]["types"])
    constant = report["benchmark"]["constant"]
    first = report["delays_s"][0]
    rows: list[tuple[str, ...]] = [
        (f"always {constant['answer']!r}", "-", *(f"{constant['types'].get(name, 0):.1%}" for name in types)),
        ("most frequent", "-", *(f"{report['floors']['types'][name]:.1%}" for name in types)),
    ]
    for curve in report["curves"]:
        cells = []
        for name in types:
            point = next((p for p in curve["types"][name] if p["delay_s"] == first), None)
            cells.append("-" if point is None else f"{point['accuracy']:.1%} ({point['n']})")
        rows.append((curve["memory"], str(curve["budget"]), *cells))
    yield grid(["memory", "budget", *types], rows, title=f"by type, at {format_delay(first)} (n)")


def _tabulate_means(benchmark: Mapping[str, Any]) -> Iterator[Any]:
    names = list(dict.fromkeys(name for score in benchmark["scores"] for name in score["means"]["official"]))
    if not names:
        return
    constant = benchmark["constant"]
    floor = (f"always {constant['answer']!r}", "-", *(_share(constant["means"].get(name)) for name in names))
    yield grid(
        ["memory", "delay", *names],
        [
            floor,
            *(
                (
                    f"{score['memory']} at {score['budget']}",
                    format_delay(score["delay_s"]),
                    *(
                        f"{_share(score['means']['official'].get(name))} / {_share(score['means']['strict'].get(name))}"
                        for name in names
                    ),
                )
                for score in benchmark["scores"]
            ),
        ],
        title="means that papers print (official / strict)",
    )


def _tabulate_ages(benchmark: Mapping[str, Any]) -> Iterator[Any]:
    borders = list(
        dict.fromkeys((age["from_s"], age["to_s"]) for score in benchmark["scores"] for age in score["ages"])
    )
    if not borders:
        return
    head = [f"{low:g} s or more" if high is None else f"{low:g} to {high:g} s" for low, high in sorted(borders)]
    rows = []
    for score in benchmark["scores"]:
        found = {(age["from_s"], age["to_s"]): age for age in score["ages"]}
        cells = (found.get(border) for border in sorted(borders))
        rows.append(
            (
                f"{score['memory']} at {score['budget']}",
                format_delay(score["delay_s"]),
                *("-" if age is None else f"{age['accuracy']:.0%} ({age['n']})" for age in cells),
            )
        )
    yield grid(["memory", "delay", *head], rows, title="by the age of the evidence (n)")


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
