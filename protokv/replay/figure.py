"""The figure of a report, and the report as one self-contained HTML page: facts, the figure as inline SVG, tables.

The figure shows accuracy against delay, by group and by question type; the page has a table of costs.

Drawn with matplotlib (the extra `plot`), without a display. Delays are evenly spaced, and the memories stand a little
beside each other, so that no curve hides another. Colours: Okabe and Ito (2008), for colour-blind readers.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from protokv.errors import ConfigError
from protokv.replay.tables import Report, format_delay, list_facts, tabulate
from protokv.version import __version__

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933", "#882255")
_LINES: Final = ("-", "--", ":")
_MARKERS: Final = ("o", "s", "^", "D")
_SUFFIXES: Final = (".png", ".svg", ".pdf")


def check_figure(path: str | Path | None = None) -> None:
    """Refuse a figure that cannot be drawn, before hours of work.

    Raises:
        ConfigError: matplotlib is not installed, or cannot write such a file there.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError("figures need matplotlib", hint="pip install 'protokv[plot]'")
    if path is None:
        return
    if Path(path).suffix.lower() not in _SUFFIXES:
        raise ConfigError(f"cannot draw to {path}", hint="name a .png, .svg or .pdf file")
    if not Path(path).parent.is_dir():
        raise ConfigError(f"cannot draw to {path}: there is no folder {Path(path).parent}", hint="make it first")


def save_figure(report: Report, path: str | Path) -> None:
    """Draw a report to a .png, .svg or .pdf file.

    Raises:
        ConfigError: matplotlib is not installed, or cannot write such a file.
    """
    check_figure(path)
    try:
        draw(report).savefig(path, dpi=110)
    except OSError as error:
        raise ConfigError(f"cannot draw to {path}: {error}", hint="name a file in a folder of yours") from error


def draw(report: Report) -> Figure:
    """Draw a row per budget with all questions and each group, and rows with the types.

    A memory that was run at one budget, such as the full cache, is in every row. Types are of the smallest budget.
    """
    from matplotlib.figure import Figure

    curves = report["curves"]
    budgets = sorted({curve["budget"] for curve in curves}, reverse=True)
    groups = list(curves[0]["groups"]) if curves else []
    types = list(curves[0]["types"]) if curves else []
    columns = max(3, 1 + len(groups), min(4, len(types)))
    rows = len(budgets) + -(-len(types) // columns)
    figure = Figure(figsize=(4.6 * columns, 3.4 * rows + 0.8), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    floors = report["floors"]
    for row, budget in zip(axes, budgets, strict=False):
        shown = _select(report, budget)
        suffix = f", {budget} tokens" if len(budgets) > 1 else ""
        _draw_curves(row[0], "all questions" + suffix, report, {i: curves[i]["all"] for i in shown}, report["floor"])
        for axis, name in zip(row[1:], groups, strict=False):
            points = {i: curves[i]["groups"][name] for i in shown}
            _draw_curves(axis, f"{name} questions" + suffix, report, points, floors["groups"][name])
        _hide(row[1 + len(groups) :])
    shown = _select(report, budgets[-1]) if budgets else []
    suffix = f", {budgets[-1]} tokens" if len(budgets) > 1 else ""
    of_types = axes[len(budgets) :].flat
    for axis, name in zip(of_types, types, strict=False):
        points = {i: curves[i]["types"][name] for i in shown}
        # Types have few questions: intervals would hide the curves.
        title = (name.replace("_", " ") or "without a type") + suffix
        _draw_curves(axis, title, report, points, floors["types"][name], intervals=False)
    _hide(of_types[len(types) :])
    # The floor stands last, behind the memories.
    found = dict(zip(*reversed(axes[0][0].get_legend_handles_labels()), strict=True))
    names = sorted(found, key=lambda name: name == _FLOOR)
    figure.legend(
        [found[name] for name in names],
        names,
        loc="outside upper center",
        ncols=min(6, max(1, len(names))),
        fontsize=11,
    )
    return figure


_FLOOR: Final = "most frequent answer"


def _select(report: Report, budget: int) -> list[int]:
    """Return the curves of a budget, and of memories that were run at one budget only."""
    names = [curve["memory"] for curve in report["curves"]]
    return [i for i, curve in enumerate(report["curves"]) if curve["budget"] == budget or names.count(names[i]) == 1]


def _draw_curves(
    axis: Axes,
    title: str,
    report: Report,
    curves: Mapping[int, Sequence[Mapping[str, Any]]],
    floor: float | None,
    *,
    intervals: bool = True,
) -> None:
    delays = report["delays_s"]
    apart = min(0.07, 0.6 / max(1, len(curves)))
    counts = sorted({point["n"] for found in curves.values() for point in found})
    ordered = sorted(curves.items(), key=lambda curve: _place(report, curve[0]))
    for place, (i, found) in enumerate(ordered):
        x = [delays.index(point["delay_s"]) + apart * (place - (len(curves) - 1) / 2) for point in found]
        y = [100 * point["accuracy"] for point in found]
        error = [[100 * (p["accuracy"] - p["low"]) for p in found], [100 * (p["high"] - p["accuracy"]) for p in found]]
        axis.errorbar(
            x,
            y,
            yerr=error if intervals else None,
            marker=_MARKERS[_place(report, i) % len(_MARKERS)],
            ms=4,
            # Later lines are thinner, so that equal curves show their edges.
            lw=3.2 - 2.2 * place / max(1, len(curves) - 1),
            elinewidth=0.7,
            label=report["curves"][i]["memory"],
            color=_choose_style(report, i)[0],
            ls=_choose_style(report, i)[1],
        )
    if floor is not None:
        axis.axhline(100 * floor, color="#777777", lw=1, ls=(0, (4, 3)), label=_FLOOR, zorder=0)
    n = "" if not counts else f", n = {counts[0]}" if len(counts) == 1 else f", n = {counts[0]} to {counts[-1]}"
    axis.set_title(title + n, fontsize=10)
    axis.set(xlabel="delay", ylabel="accuracy, %", ylim=(-4, 104), xlim=(-0.5, len(delays) - 0.5))
    axis.set_xticks(range(len(delays)), [format_delay(delay) for delay in delays], fontsize=9)
    axis.grid(alpha=0.25)


def _hide(axes: Any) -> None:
    for axis in axes:
        axis.set_visible(False)


def _place(report: Report, i: int) -> int:
    """Return the number of a curve's memory, in order of first appearance."""
    memories = list(dict.fromkeys(curve["memory"] for curve in report["curves"]))
    return memories.index(report["curves"][i]["memory"])


def _choose_style(report: Report, i: int) -> tuple[str, str]:
    """Return colour and line of a memory, the same in every part of the figure."""
    place = _place(report, i)
    return _COLOURS[place % len(_COLOURS)], _LINES[place // len(_COLOURS) % len(_LINES)]


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


def save_page(report: Report, path: str | Path, *, made: datetime | None = None, command: str | None = None) -> None:
    """Write the page of a report of `summarise`, with the time and the command that made it."""
    from jinja2 import Environment

    drawn = io.StringIO()
    draw(report).savefig(drawn, format="svg", metadata={"Date": None})
    svg = drawn.getvalue()
    facts = list_facts(report) | {"written by": f"protokv {__version__}"}
    if command:
        facts["command"] = command
    if made:
        facts["made"] = f"{made:%Y-%m-%d %H:%M %Z}".strip()
    page = Environment(autoescape=True).from_string(_PAGE)
    # HTML has no place for the XML prologue of the figure.
    text = page.render(facts=facts, figure=svg[svg.index("<svg") :], tables=list(tabulate(report)))
    Path(path).write_text(text, encoding="utf-8")
