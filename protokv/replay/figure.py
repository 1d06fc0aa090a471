"""The figure of a report: accuracy of all questions against delay in true time.

Drawn with matplotlib (the extra `plot`), without a display. Colours: Okabe and Ito (2008), for
colour-blind readers.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from protokv.errors import ConfigError
from protokv.memories import FullConfig
from protokv.replay.report import ReplayReport
from protokv.replay.tables import format_delay

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS: Final = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#1a1a1b",
    "#999933",
    "#AA4499",
)
_MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X")
_LINES: Final = ("-", "--", ":", "-.")
_FORMS: Final = (".png", ".pdf", ".svg")


def check_figure_path(path: str | Path) -> None:
    """Refuse a figure that cannot be drawn, before hours of work. ConfigError: no matplotlib, form,
    or folder.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError("figures need matplotlib", hint="pip install matplotlib")
    if Path(path).suffix.lower() not in _FORMS:
        raise ConfigError(
            f"cannot draw to {path}", hint=f"name a file with one of {', '.join(_FORMS)}"
        )
    if not Path(path).parent.is_dir():
        raise ConfigError(
            f"cannot draw to {path}: there is no folder {Path(path).parent}", hint="make it first"
        )


def save_report_figure(report: ReplayReport, path: str | Path) -> None:
    """Draw a figure in the form of the suffix. ConfigError: as `check_figure_path`."""
    check_figure_path(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.4), layout="constrained")
    axis = figure.subplots()
    _draw_curves(axis, report)
    axis.axhline(
        100 * report["floor"], color="#777777", lw=1, ls=":", label="without watching", zorder=0
    )
    _mark_delays(axis, report["delays_s"])
    figure.legend(loc="outside right upper", fontsize=8)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(
            f"cannot draw to {path}: {error}", hint="name a file in a folder of yours"
        ) from error


def _draw_curves(axis: Axes, report: ReplayReport) -> None:
    """Draw a curve for each memory, in its colour, at each budget, in the budget's style of
    lines.
    """
    from matplotlib.transforms import ScaledTranslation

    drawn = [point for point in report["points"] if point["part"] == "all"]
    memories = list(dict.fromkeys(point["memory"] for point in drawn))
    # The full cache ignores its budget.
    budgets = sorted(
        {point["budget"] for point in drawn if point["memory"] != FullConfig.name}, reverse=True
    )
    curves = list(dict.fromkeys((point["memory"], point["budget"]) for point in drawn))
    for order, (memory, budget) in enumerate(curves):
        points = [
            point for point in drawn if (point["memory"], point["budget"]) == (memory, budget)
        ]
        points.sort(key=lambda point: float(point["delay_s"]))
        number = memories.index(memory)
        full = memory == FullConfig.name
        # A little beside each other on the paper, so that no interval hides another; the axis stays
        # that of time.
        aside = ScaledTranslation(
            min(1.5, 8 / len(curves)) * (order - (len(curves) - 1) / 2) / 72,
            0,
            axis.figure.dpi_scale_trans,
        )
        axis.errorbar(
            [point["delay_s"] for point in points],
            [100 * point["accuracy"] for point in points],
            yerr=[
                [100 * abs(point[end] - point["accuracy"]) for point in points]
                for end in ("low", "high")
            ],
            transform=axis.transData + aside,
            marker=_MARKERS[number % len(_MARKERS)],
            color=_COLOURS[number % len(_COLOURS)],
            ls=_LINES[0 if full else budgets.index(budget) % len(_LINES)],
            # Hollow: few questions or videos.
            mfc="none" if any(point["thin"] for point in points) else None,
            elinewidth=0.7,
            ms=4.5,
            label=memory if full or len(budgets) == 1 else f"{memory}, {budget} tokens",
        )


def _mark_delays(axis: Axes, delays_s: list[float]) -> None:
    """Make an axis of true time: linear to the first delay and logarithmic from there if the delays
    span decades.
    """
    later = [delay for delay in delays_s if delay > 0] or [1.0]
    wide = later[-1] > 20 * later[0]
    if wide:
        axis.set_xscale("symlog", linthresh=later[0])
    ends = (-0.2 * later[0], 1.3 * later[-1]) if wide else (-0.04 * later[-1], 1.04 * later[-1])
    axis.set(
        xlabel="delay after the evidence", ylabel="right answers, %", ylim=(-4, 104), xlim=ends
    )
    axis.set_xticks(delays_s, [format_delay(delay) for delay in delays_s])
    axis.minorticks_off()
    axis.grid(alpha=0.25)
