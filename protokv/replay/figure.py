"""Figures of a report: accuracy against delay, the same by question type, and cost against accuracy.

Drawn with matplotlib (the extra `plot`), without a display. The page is one file: the figure as inline SVG, and the
tables. Colours are those of Okabe and Ito (2008), told apart by colour-blind readers.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from protokv.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933", "#882255")
_MARKERS: Final = ("o", "s", "^", "D")
_MARKER_NAMES: Final = {"o": "circle", "s": "square", "^": "triangle", "D": "diamond"}


def save_png(report: Mapping[str, Any], path: str | Path) -> None:
    """Draw a report to a PNG, or to the form that the suffix names (.svg, .pdf).

    Raises:
        ConfigError: matplotlib is not installed, or cannot write such a file.
    """
    figure = draw(report)
    try:
        figure.savefig(path, dpi=110)
    except (ValueError, OSError) as error:
        raise ConfigError(f"cannot draw to {path}: {error}", hint="name a .png, .svg or .pdf file") from error


def save_html(report: Mapping[str, Any], path: str | Path) -> None:
    """Write a page that needs nothing but itself.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    drawn = io.StringIO()
    draw(report).savefig(drawn, format="svg", metadata={"Date": None})
    svg = drawn.getvalue()
    # Without the XML prologue, which has no place inside HTML.
    Path(path).write_text(_PAGE.format(figure=svg[svg.index("<svg") :], tables=_tables(report)), encoding="utf-8")


def draw(report: Mapping[str, Any]) -> Figure:
    """Draw one row per budget with all questions and each group, rows with the types, and a row with the costs.

    A memory that was run at one budget where others have several, such as the full cache, is drawn in every row. The
    types are those of the smallest budget.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("figures need matplotlib", hint="pip install 'protokv[plot]'") from error
    curves = report["curves"]
    budgets = sorted({curve["budget"] for curve in curves}, reverse=True)
    groups = list(curves[0]["groups"]) if curves else []
    types = list(curves[0]["types"]) if curves else []
    columns = max(3, 1 + len(groups), min(4, len(types)))
    rows = len(budgets) + -(-len(types) // columns) + 1
    figure = Figure(figsize=(4.2 * columns, 3.1 * rows + 0.6), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for row, budget in zip(axes, budgets, strict=False):
        shown = _at(report, budget)
        suffix = f", {budget} tokens" if len(budgets) > 1 else ""
        _curves(row[0], f"all questions{suffix}", report, {i: curves[i]["all"] for i in shown})
        for axis, name in zip(row[1:], groups, strict=False):
            _curves(axis, f"{name}{suffix}", report, {i: curves[i]["groups"][name] for i in shown})
        _blank(row[1 + len(groups) :])
    shown = _at(report, budgets[-1]) if budgets else []
    suffix = f", {budgets[-1]} tokens" if len(budgets) > 1 else ""
    of_types = axes[len(budgets) : -1].flat
    for axis, name in zip(of_types, types, strict=False):
        # With few questions per type the bands would hide the curves.
        _curves(axis, f"{name}{suffix}", report, {i: curves[i]["types"][name] for i in shown}, bands=False)
    _blank(of_types[len(types) :])
    for axis, key in zip(axes[-1], _COSTS, strict=False):
        _costs(axis, key, report)
    _blank(axes[-1][len(_COSTS) :])
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(9, max(1, len(labels))), fontsize=10)
    return figure


def _at(report: Mapping[str, Any], budget: int) -> list[int]:
    """The curves of a budget, and those of memories that were run at one only."""
    names = [curve["memory"] for curve in report["curves"]]
    return [i for i, curve in enumerate(report["curves"]) if curve["budget"] == budget or names.count(names[i]) == 1]


# What is drawn against accuracy: the label, the unit in the numbers of the report, and the scale.
_COSTS: Final = {
    "total_ms_median": ("end-to-end latency, median, ms", 1, "linear"),
    "state_bytes": ("state, MiB", 2**20, "log"),
    "step_ms": ("update and encoding of a step, ms", 1, "linear"),
}


def _curves(
    axis: Axes,
    title: str,
    report: Mapping[str, Any],
    curves: Mapping[int, Sequence[Mapping[str, Any]]],
    *,
    bands: bool = True,
) -> None:
    for i, found in curves.items():
        x = [point["delay_s"] for point in found]
        share = [point["accuracy"] for point in found]
        colour, name = _colour(report, i), report["curves"][i]["memory"]
        axis.plot(x, share, color=colour, marker="o", ms=3, lw=1.4, label=name)
        if bands:
            low, high = [point["low"] for point in found], [point["high"] for point in found]
            axis.fill_between(x, low, high, color=colour, alpha=0.08, lw=0)
    axis.set(title=title, xlabel="delay, s", ylabel="accuracy", ylim=(-0.02, 1.02))
    delays = report["delays_s"]
    if delays and delays[-1] > 60:
        axis.set_xscale("symlog", linthresh=30)
        axis.set_xticks(delays, [f"{delay:g}" for delay in delays], fontsize=8)
        axis.minorticks_off()
    axis.grid(alpha=0.25)


def _costs(axis: Axes, key: str, report: Mapping[str, Any]) -> None:
    label, unit, scale = _COSTS[key]
    budgets = sorted({curve["budget"] for curve in report["curves"]}, reverse=True)
    for i, (curve, cost) in enumerate(zip(report["curves"], report["costs"], strict=True)):
        last, x = curve["all"][-1], cost[key] / unit
        error = [[last["accuracy"] - last["low"]], [last["high"] - last["accuracy"]]]
        marker = _MARKERS[budgets.index(curve["budget"]) % len(_MARKERS)]
        axis.errorbar([x], [last["accuracy"]], yerr=error, fmt=marker, color=_colour(report, i), ms=6, lw=1)
    axis.set(xlabel=label, ylabel="accuracy at the longest delay", ylim=(-0.02, 1.02), xscale=scale)
    if len(budgets) > 1:
        marks = zip(_MARKERS, budgets, strict=False)
        axis.set_title(", ".join(f"{_MARKER_NAMES[mark]} {budget} tokens" for mark, budget in marks), fontsize=9)
    axis.margins(x=0.1)
    axis.xaxis.set_major_formatter("{x:.3g}")
    if scale == "log":
        axis.xaxis.set_minor_formatter("")
    else:
        axis.set_xlim(left=0)
    axis.grid(alpha=0.25)


def _blank(axes: Any) -> None:
    for axis in axes:
        axis.set_visible(False)


def _colour(report: Mapping[str, Any], i: int) -> str:
    memories = list(dict.fromkeys(curve["memory"] for curve in report["curves"]))
    return _COLOURS[memories.index(report["curves"][i]["memory"]) % len(_COLOURS)]


def _name(report: Mapping[str, Any], i: int) -> str:
    curve = report["curves"][i]
    several = len({other["budget"] for other in report["curves"]}) > 1
    return f"{curve['memory']}, {curve['budget']}" if several else str(curve["memory"])


def _tables(report: Mapping[str, Any]) -> str:
    parts = []
    names = ["all", *(report["curves"][0]["groups"] if report["curves"] else ())]
    for name in names:
        head = "".join(f"<th>{delay:g} s</th>" for delay in report["delays_s"])
        body = []
        for i, curve in enumerate(report["curves"]):
            points = {p["delay_s"]: p for p in (curve["all"] if name == "all" else curve["groups"][name])}
            cells = "".join(f"<td>{_cell(points.get(delay))}</td>" for delay in report["delays_s"])
            body.append(f"<tr><th>{escape(_name(report, i))}</th>{cells}</tr>")
        title = "All questions" if name == "all" else escape(str(name).capitalize())
        parts.append(f"<h2>{title}</h2><table><tr><th>memory</th>{head}</tr>{''.join(body)}</table>")
    facts = f"{report['questions']} questions about {report['videos']} videos; reference times: " + ", ".join(
        f"{n} from the {escape(name)}" for name, n in report["reference"].items()
    )
    return f"<p>{facts}. Always the most frequent answer of a type: {report['floor']}.</p>" + "".join(parts)


def _cell(point: Mapping[str, Any] | None) -> str:
    if point is None:
        return "-"
    return f"{point['accuracy']:.2f} <small>[{point['low']:.2f}, {point['high']:.2f}], n = {point['n']}</small>"


_PAGE: Final = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Accuracy against delay</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1200px; padding: 0 1rem; color: #1a1a1a }}
svg {{ width: 100%; height: auto }}
table {{ border-collapse: collapse; margin-bottom: 1.5rem }}
th, td {{ padding: .25rem .8rem; text-align: right; border-bottom: 1px solid #ddd }}
th:first-child {{ text-align: left }}
small {{ color: #666 }}
</style>
<h1>Accuracy against delay</h1>
{figure}
{tables}
</html>
"""
