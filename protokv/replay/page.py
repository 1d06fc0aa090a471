"""A report as one HTML page that needs nothing but itself: facts, the figure as inline SVG, accuracies and costs."""

from __future__ import annotations

import io
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from protokv.replay.figure import draw
from protokv.replay.report import format_delay, format_group
from protokv.version import __version__

_PAGE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Accuracy against delay</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1200px; padding: 0 1rem; color: #1a1a1a }
figure, .wide { margin: 0 0 1.5rem; overflow-x: auto }
svg { width: 100%; min-width: 700px; height: auto }
table { border-collapse: collapse }
th, td { padding: .25rem .8rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap }
th:first-child { text-align: left }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem }
dt { color: #666 } dd { margin: 0; overflow-wrap: anywhere }
small { color: #666 }
</style>
</head>
<body>
<h1>Accuracy against delay</h1>
<dl>{% for name, value in facts.items() %}<dt>{{ name }}</dt><dd>{{ value }}</dd>{% endfor %}</dl>
<figure>{{ figure | safe }}</figure>
{% for table in tables %}
<h2>{{ table.title }}</h2>
<div class="wide"><table>
<tr>{% for cell in table.head %}<th>{{ cell }}</th>{% endfor %}</tr>
{% for row in table.rows %}<tr><th>{{ row[0] }}</th>{% for cell in row[1:] %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table></div>
{% endfor %}
</body>
</html>
"""


def save_page(
    report: Mapping[str, Any], path: str | Path, *, made: datetime | None = None, command: str | None = None
) -> None:
    """Write the page.

    Args:
        report: of `summarise`.
        path: of the page.
        made: when the report was made.
        command: what made it.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    from jinja2 import Environment

    drawn = io.StringIO()
    draw(report).savefig(drawn, format="svg", metadata={"Date": None})
    svg = drawn.getvalue()
    page = Environment(autoescape=True).from_string(_PAGE)
    text = page.render(
        facts=_list_facts(report, made, command),
        # Without the XML prologue, which has no place inside HTML.
        figure=svg[svg.index("<svg") :],
        tables=[*_tabulate_accuracy(report), _tabulate_costs(report)],
    )
    Path(path).write_text(text, encoding="utf-8")


def _list_facts(report: Mapping[str, Any], made: datetime | None, command: str | None) -> dict[str, str]:
    setup = report["setup"]
    references = ", ".join(f"{n} from the {name} time" for name, n in report["reference"].items())
    facts = {
        "asked": f"{report['questions']} questions about {report['videos']} videos",
        "delay counted": references,
        "floor": f"{100 * report['floor']:.0f} %, always the most frequent answer of a type",
        "model": f"{setup['model']}, {setup['dtype']}, weights {setup['weights_digest'][:12] or 'without a digest'}",
        "ran on": ", ".join(setup["devices"]),
        "sampled": f"{setup['fps']:g} frames per second",
        "protocol": f"{setup['protocol']}, protokv {__version__}",
    }
    benchmark = report["benchmark"]
    if benchmark:
        constant = benchmark["constant"]
        facts |= {
            "data set": f"{benchmark['dataset']}, {benchmark['source']} ({benchmark['licence']})",
            "prompt": ", ".join(benchmark["prompt_hash"]),
            "frames": ", ".join(f"{name} {value}" for name, value in setup["frames"].items()),
            "judged by": "; ".join(f"{who} ({n})" for who, n in benchmark["judges"].items()),
            "constant answer": f"{100 * constant['accuracy']:.1f} %, always {constant['answer']!r}",
        }
    if command:
        facts["command"] = command
    if made:
        facts["made"] = f"{made:%Y-%m-%d %H:%M %Z}".strip()
    return facts


def _tabulate_accuracy(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    delays = report["delays_s"]
    tables = []
    for name in ("all", *(report["curves"][0]["groups"] if report["curves"] else ())):
        rows = []
        for curve, cost in zip(report["curves"], report["costs"], strict=True):
            points = {p["delay_s"]: p for p in (curve["all"] if name == "all" else curve["groups"][name])}
            spent = [f"{cost['state_bytes'] / 1e3:.0f}", f"{cost['step_ms']:.1f}"]
            rows.append([_name(report, curve), *spent, *(_format_point(points.get(delay)) for delay in delays)])
        title = f"{format_group(name).capitalize()}: accuracy with its 95 % interval"
        head = ["memory", "state, kB", "step, ms", *map(format_delay, delays)]
        tables.append({"title": title, "head": head, "rows": rows})
    return [*tables, *_tabulate_differences(report)]


def _tabulate_differences(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    tables = []
    for name in dict.fromkeys(found["group"] for found in report["differences"]):
        rows = []
        for found in (found for found in report["differences"] if found["group"] == name):
            points = {point["delay_s"]: point for point in found["points"]}
            pair = f"{found['memory']} {found['budget']} less {found['than']} {found['than_budget']}"
            rows.append([pair, *(_format_difference(points.get(delay)) for delay in report["delays_s"])])
        title = f"{format_group(name).capitalize()}: difference on the same questions in points, 95 % interval"
        tables.append({"title": title, "head": ["memories", *map(format_delay, report["delays_s"])], "rows": rows})
    return tables


def _format_difference(point: Mapping[str, Any] | None) -> str:
    if point is None:
        return "-"
    share, low, high = (100 * point[name] for name in ("difference", "low", "high"))
    return f"{share:+.0f} [{low:+.0f}, {high:+.0f}], n = {point['n']}"


def _tabulate_costs(report: Mapping[str, Any]) -> dict[str, Any]:
    columns = [
        ("first token, median, ms", "ttft_ms_median"),
        ("95th percentile, ms", "ttft_ms_p95"),
        ("whole answer, median, ms", "total_ms_median"),
        ("95th percentile, ms", "total_ms_p95"),
        ("step, ms", "step_ms"),
    ]
    rows = [
        [
            _name(report, cost),
            *(f"{cost[key]:.1f}" for _, key in columns),
            f"{cost['state_bytes'] / 2**20:.3g}",
            f"{cost['context_tokens']}",
            f"{cost['compression']:.1f}",
        ]
        for cost in report["costs"]
    ]
    head = ["memory", *(title for title, _ in columns), "state, MiB", "tokens shown", "seen / shown"]
    return {"title": "Costs", "head": head, "rows": rows}


def _name(report: Mapping[str, Any], entry: Mapping[str, Any]) -> str:
    several = len({curve["budget"] for curve in report["curves"]}) > 1
    return f"{entry['memory']}, {entry['budget']} tokens" if several else str(entry["memory"])


def _format_point(point: Mapping[str, Any] | None) -> str:
    if point is None:
        return "-"
    share, low, high = (100 * point[name] for name in ("accuracy", "low", "high"))
    return f"{share:.0f} % [{low:.0f}, {high:.0f}], n = {point['n']}"
