"""The figure of a report, and the report as one self-contained HTML page: conclusion, figures as inline SVG, tables.

A panel shows accuracy against delay: of all questions, of a group or of a type, at one budget. `draw` puts all panels
into one figure; the page has a figure for each, so that they stand side by side on a wide screen and below each other
on a telephone.

Drawn with matplotlib (the extra `plot`), without a display. Delays are evenly spaced, and the memories stand a little
beside each other, so that no curve hides another; equal curves are also named. Each memory has a colour, a marker and a
line of its own. Colours: Okabe and Ito (2008), for colour-blind readers.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any, Final

from protokv import __version__
from protokv.errors import ConfigError
from protokv.replay.tables import FEW, FEW_NOTE, Report, format_delay, list_facts, list_groups, tabulate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The colour of text and frames; a page puts its own in its place.
_INK: Final = "#1a1a1b"
_COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", _INK, "#999933", "#AA4499")
# Two numbers without a common divisor, and 9 colours: the look of a memory comes again after 36.
_LINES: Final = ("-", "--", ":", "-.")
_MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X", "*", "h")
_SUFFIXES: Final = (".png", ".svg", ".pdf")
_GUESS: Final = "without watching"
_PAGE: Final = Path(__file__).with_name("page.html")


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


@dataclass(frozen=True, slots=True)
class _Panel:
    """One panel: its curves by their number in the report, and the accuracy without watching."""

    title: str
    budget: int
    curves: Mapping[int, Sequence[Mapping[str, Any]]]
    floor: float | None
    intervals: bool = True


def _list_panels(report: Report) -> Iterator[list[_Panel]]:
    """Yield the panels of a row: all questions and each group of each budget, largest first, then the types.

    A memory that was run at one budget, such as the full cache, is in every row. Types are of the smallest budget.
    """
    curves, floors = report["curves"], report["floors"]
    budgets = sorted({curve["budget"] for curve in curves}, reverse=True)
    for budget in budgets:
        shown = _select(report, budget)
        row = [_Panel("all questions", budget, {i: curves[i]["all"] for i in shown}, report["floor"])]
        for name in list_groups(report):
            points = {i: curves[i]["groups"][name] for i in shown}
            row.append(_Panel(f"{name} questions", budget, points, floors["groups"][name]))
        yield row
    shown, types = _select(report, budgets[-1]), list(curves[0]["types"])
    yield [
        # Types have few questions: intervals would hide the curves.
        _Panel(
            f'type "{name.replace("_", " ")}"' if name else "questions without a type",
            budgets[-1],
            {i: curves[i]["types"][name] for i in shown},
            floors["types"][name],
            intervals=False,
        )
        for name in types
    ]


def draw(report: Report) -> Figure:
    """Draw all panels into one figure: a row per budget, and rows with the types."""
    from matplotlib.figure import Figure

    *parts, types = _list_panels(report)
    columns = max(3, len(parts[0]), min(4, len(types)))
    parts += [types[i : i + columns] for i in range(0, len(types), columns)]
    figure = Figure(figsize=(4.6 * columns, 3.4 * len(parts) + 0.8), layout="constrained")
    axes = figure.subplots(len(parts), columns, squeeze=False)
    labels = _label_panels()
    for row, panels in zip(axes, parts, strict=True):
        for axis, panel in zip(row, panels, strict=False):
            _draw_panel(axis, next(labels), panel, report)
        for axis in row[len(panels) :]:
            axis.set_visible(False)
    handles, names = _list_lines(axes[0][0])
    figure.legend(handles, names, loc="outside upper center", ncols=min(6, len(names)), fontsize=11)
    return figure


def draw_panels(report: Report) -> Iterator[str]:
    """Draw each panel as an SVG of its own, with its legend; text is text, and takes the colour of the page."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    labels = _label_panels()
    for panel in (panel for row in _list_panels(report) for panel in row):
        label, drawn = next(labels), io.StringIO()
        # Figures of one page need names of their own for what they define.
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": label, "font.sans-serif": ["DejaVu Sans"]}):
            figure = Figure(figsize=(4.4, 3.9), layout="constrained")
            axis = figure.subplots()
            _draw_panel(axis, label, panel, report)
            handles, names = _list_lines(axis)
            figure.legend(
                handles, names, loc="outside lower center", ncols=3, fontsize=8, frameon=False, labelcolor=_INK
            )
            figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
        # HTML has no place for the XML prologue; the numbers of parts are not unique in a page and nothing needs them.
        svg = re.sub(r' id="[\w.]+_\d+"', "", drawn.getvalue()[drawn.getvalue().index("<svg") :])
        name = escape(f"{label}: accuracy against delay, {panel.title}, {panel.budget} tokens", quote=True)
        yield svg.replace("<svg", f'<svg role="img" aria-label="{name}"', 1).replace(_INK, "currentColor")


def _label_panels() -> Iterator[str]:
    """Yield a, b, ..., z, a1, b1, ..."""
    for round_ in count():
        yield from (letter + (str(round_) if round_ else "") for letter in ascii_lowercase)


def _select(report: Report, budget: int) -> list[int]:
    """Return the curves of a budget, and of memories that were run at one budget only."""
    names = [curve["memory"] for curve in report["curves"]]
    return [i for i, curve in enumerate(report["curves"]) if curve["budget"] == budget or names.count(names[i]) == 1]


def _draw_panel(axis: Axes, label: str, panel: _Panel, report: Report) -> None:
    delays, curves = report["delays_s"], panel.curves
    apart = min(0.09, 0.6 / max(1, len(curves)))
    counts = sorted({point["n"] for found in curves.values() for point in found})
    few = any(point["thin"] for found in curves.values() for point in found)
    ordered = sorted(curves.items(), key=lambda curve: _place(report, curve[0]))
    for order, (i, found) in enumerate(ordered):
        x = [delays.index(point["delay_s"]) + apart * (order - (len(curves) - 1) / 2) for point in found]
        y = [100 * point["accuracy"] for point in found]
        error = [[100 * (p["accuracy"] - p["low"]) for p in found], [100 * (p["high"] - p["accuracy"]) for p in found]]
        place = _place(report, i)
        axis.errorbar(
            x,
            y,
            yerr=error if panel.intervals else None,
            marker=_MARKERS[place % len(_MARKERS)],
            ms=5,
            # Hollow: few questions or videos.
            mfc="none" if few else None,
            # Later lines are thinner, so that equal curves show their edges.
            lw=2.8 - 1.8 * order / max(1, len(curves) - 1),
            elinewidth=0.7,
            label=report["curves"][i]["memory"],
            color=_COLOURS[place % len(_COLOURS)],
            ls=_LINES[place % len(_LINES)],
        )
    if panel.floor is not None:
        axis.axhline(100 * panel.floor, color="#777777", lw=1, ls=(0, (1, 3)), label=_GUESS, zorder=0)
    n = "" if not counts else f"n = {counts[0]}" if len(counts) == 1 else f"n = {counts[0]} to {counts[-1]}"
    axis.set_title(
        f"{label}: {panel.title}, {panel.budget} tokens\n{n}{FEW if few else ''}", fontsize=10, loc="left", color=_INK
    )
    axis.set(ylabel="right answers, %", ylim=(-4, 104), xlim=(-0.5, len(delays) - 0.5))
    axis.set_xlabel("\n".join(["delay", *_name_equal(report, curves)]), fontsize=9)
    axis.set_xticks(range(len(delays)), [format_delay(delay) for delay in delays], fontsize=9)
    axis.grid(alpha=0.25)
    axis.xaxis.label.set_color(_INK)
    axis.yaxis.label.set_color(_INK)
    axis.tick_params(colors=_INK)
    for spine in axis.spines.values():
        spine.set_color(_INK)


def _name_equal(report: Report, curves: Mapping[int, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Return lines of text that name the curves that are equal everywhere."""
    same: dict[tuple[Any, ...], list[str]] = {}
    for i, found in curves.items():
        points = tuple((point["delay_s"], point["accuracy"]) for point in found)
        same.setdefault(points, []).append(report["curves"][i]["memory"])
    told = "; ".join(" = ".join(names) for names in same.values() if len(names) > 1)
    return textwrap.wrap(f"equal: {told}", 58) if told else []


def _list_lines(axis: Axes) -> tuple[list[Any], list[str]]:
    """Return handles and names of a legend; the line of guessing stands last."""
    found = zip(*axis.get_legend_handles_labels(), strict=True)
    handles, names = zip(*sorted(found, key=lambda line: line[1] == _GUESS), strict=True)
    return list(handles), list(names)


def _place(report: Report, i: int) -> int:
    """Return the number of a curve's memory, in order of first appearance: its look in every panel."""
    memories = list(dict.fromkeys(curve["memory"] for curve in report["curves"]))
    return memories.index(report["curves"][i]["memory"])


def save_page(report: Report, path: str | Path, *, made: datetime | None = None, command: str | None = None) -> None:
    """Write the page of a report of `summarise`, with the time and the command that made it."""
    from jinja2 import Environment

    facts = list_facts(report) | {"written by": f"protokv {__version__}"}
    if command:
        facts["command"] = command
    if made:
        facts["made"] = f"{made:%Y-%m-%d %H:%M %Z}".strip()
    parts = {"drawings": list(draw_panels(report)), "tables": list(tabulate(report)), "facts": facts}
    lead = [report["conclusion"]["text"], *report["conclusion"]["details"]]
    page = Environment(autoescape=True).from_string(_PAGE.read_text(encoding="utf-8"))
    text = page.render(**parts, lead=lead, few=FEW, few_note=FEW_NOTE, guess=_GUESS)
    Path(path).write_text(text, encoding="utf-8")
