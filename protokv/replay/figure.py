"""The figure of a report: accuracy against delay, a row of panels for each budget.

Drawn with matplotlib (the extra `plot`), without a display. Delays are evenly spaced, and the memories stand a little
beside each other, so that no curve hides another. Colours: Okabe and Ito (2008), for colour-blind readers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from protokv.errors import ConfigError
from protokv.replay.report import Report
from protokv.replay.tables import format_delay

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#1a1a1b", "#999933", "#AA4499")
_MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X")


def check_figure(path: str | Path) -> None:
    """Refuse a figure that cannot be drawn, before hours of work. ConfigError: no matplotlib, no .png, or no folder."""
    if find_spec("matplotlib") is None:
        raise ConfigError("figures need matplotlib", hint="pip install 'protokv[plot]'")
    if Path(path).suffix.lower() != ".png":
        raise ConfigError(f"cannot draw to {path}", hint="name a .png file")
    if not Path(path).parent.is_dir():
        raise ConfigError(f"cannot draw to {path}: there is no folder {Path(path).parent}", hint="make it first")


def save_figure(report: Report, path: str | Path) -> None:
    """Draw all questions and each group at each budget, to a .png file. ConfigError: as `check_figure`."""
    check_figure(path)
    from matplotlib.figure import Figure

    drawn = [point for point in report["points"] if point["part"] != "type"]
    budgets = sorted({point["budget"] for point in drawn}, reverse=True)
    memories = list(dict.fromkeys(point["memory"] for point in drawn))
    # A memory that ran at one budget only, such as the full cache, stands in every row.
    once = {name for name in memories if len({point["budget"] for point in drawn if point["memory"] == name}) == 1}
    parts = ["all", *report["groups"]]
    figure = Figure(figsize=(4.6 * len(parts), 3.4 * len(budgets) + 0.8), layout="constrained")
    axes = figure.subplots(len(budgets), len(parts), squeeze=False)
    for row, budget in zip(axes, budgets, strict=True):
        for axis, part in zip(row, parts, strict=True):
            curves: dict[str, list[Mapping[str, Any]]] = {}
            for point in sorted(drawn, key=lambda point: float(point["delay_s"])):
                if point["name"] == part and (point["budget"] == budget or point["memory"] in once):
                    curves.setdefault(point["memory"], []).append(point)
            _draw_curves(axis, curves, memories, report["delays_s"])
            floor = report["floor"] if part == "all" else report["floors"][part]
            axis.axhline(100 * floor, color="#777777", lw=1, ls=":", label="without watching", zorder=0)
            axis.set_title(f"{part} questions, {budget} tokens", fontsize=10, loc="left")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(6, len(labels)))
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise ConfigError(f"cannot draw to {path}: {error}", hint="name a file in a folder of yours") from error


def _draw_curves(
    axis: Axes, curves: Mapping[str, Sequence[Mapping[str, Any]]], memories: Sequence[str], delays_s: Sequence[float]
) -> None:
    apart = min(0.09, 0.6 / max(1, len(curves)))
    for order, (memory, points) in enumerate(curves.items()):
        number = memories.index(memory)
        axis.errorbar(
            [delays_s.index(one["delay_s"]) + apart * (order - (len(curves) - 1) / 2) for one in points],
            [100 * one["accuracy"] for one in points],
            yerr=[[100 * abs(one[end] - one["accuracy"]) for one in points] for end in ("low", "high")],
            marker=_MARKERS[number % len(_MARKERS)],
            color=_COLOURS[number % len(_COLOURS)],
            # Hollow: few questions or videos.
            mfc="none" if any(one["thin"] for one in points) else None,
            elinewidth=0.7,
            label=memory,
        )
    axis.set(xlabel="delay", ylabel="right answers, %", ylim=(-4, 104), xlim=(-0.5, len(delays_s) - 0.5))
    axis.set_xticks(range(len(delays_s)), [format_delay(delay) for delay in delays_s])
    axis.grid(alpha=0.25)
