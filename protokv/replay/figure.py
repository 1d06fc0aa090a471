"""The figure of a report: accuracy of all questions against delay in true time.

Drawn with matplotlib (the extra `plot`), without a display, in its style for colour-blind readers.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from protokv.errors import ConfigError
from protokv.memories import FullConfig
from protokv.replay.report import ReplayReport
from protokv.replay.tables import format_delay

_FORMS = (".png", ".pdf", ".svg")


def check_figure_path(path: str | Path) -> None:
    """Refuse a figure that cannot be drawn, before hours of work. ConfigError: no matplotlib, form,
    or folder.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError("figures need matplotlib", hint="pip install matplotlib")
    if Path(path).suffix.lower() not in _FORMS or not Path(path).parent.is_dir():
        raise ConfigError(
            f"cannot draw to {path}",
            hint=f"name a file with one of {', '.join(_FORMS)}, in a folder that exists",
        )


def save_report_figure(report: ReplayReport, path: str | Path) -> None:
    """Draw a curve for each memory at each budget, in the form of the suffix.

    The axis of delays is logarithmic from the first one on if they span decades. ConfigError: as
    `check_figure_path`.
    """
    check_figure_path(path)
    from matplotlib import style
    from matplotlib.figure import Figure

    curves: dict[tuple[str, int], list[dict[str, float]]] = {}
    for point in report["points"]:
        if point["part"] == "all":
            curves.setdefault((point["memory"], point["budget"]), []).append(point)
    with style.context("tableau-colorblind10"):
        figure = Figure(figsize=(7, 4.4), layout="constrained")
        axis = figure.subplots()
        for (memory, budget), points in curves.items():
            points.sort(key=lambda point: point["delay_s"])
            axis.errorbar(
                [point["delay_s"] for point in points],
                [100 * point["accuracy"] for point in points],
                yerr=[
                    [100 * abs(point[end] - point["accuracy"]) for point in points]
                    for end in ("low", "high")
                ],
                marker="o",
                elinewidth=0.7,
                # The full cache ignores its budget.
                label=memory if memory == FullConfig.name else f"{memory}, {budget} tokens",
            )
        axis.axhline(100 * report["floor"], color="gray", ls=":", label="without watching")
        delays_s = report["delays_s"]
        later_s = [delay_s for delay_s in delays_s if delay_s > 0]
        if later_s and later_s[-1] > 20 * later_s[0]:
            axis.set_xscale("symlog", linthresh=later_s[0])
        axis.set(xlabel="delay after the evidence", ylabel="right answers, %", ylim=(-4, 104))
        axis.set_xticks(delays_s, [format_delay(delay_s) for delay_s in delays_s])
        figure.legend(loc="outside right upper", fontsize=8)
        figure.savefig(path, dpi=150)
