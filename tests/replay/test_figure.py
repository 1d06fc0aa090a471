"""The figure is written, and refused before the run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protokv.errors import ConfigError
from protokv.replay.figure import check_figure_path, save_report_figure
from protokv.replay.report import summarise_answers
from tests.replay.rows import example_rows


@pytest.mark.parametrize(("longest", "scale"), [(120.0, "linear"), (3600.0, "symlog")])
def test_a_figure_has_a_curve_for_each_memory_and_budget_over_true_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, longest: float, scale: str
) -> None:
    made: list[Any] = []
    figure = pytest.importorskip("matplotlib.figure").Figure
    monkeypatch.setattr(figure, "savefig", lambda self, path, **_: made.append(self))
    delays = {0.0: 0.0, 30.0: 30.0, 120.0: longest}
    rows = [replace(row, delay_s=delays[row.delay_s]) for row in example_rows()]
    rows += [replace(row, budget=16) for row in rows if row.memory == "window"]
    save_report_figure(summarise_answers(rows), tmp_path / "x.png")
    ((axis,),) = (one.axes for one in made)
    assert axis.get_xscale() == scale
    curves = {bars.get_label(): list(bars.lines[0].get_xdata()) for bars in axis.containers}
    memories = ("full", "window, 64 tokens", "window, 16 tokens")
    assert curves == {name: [*delays.values()] for name in memories}


@pytest.mark.parametrize(
    ("name", "start", "said"),
    [
        ("x.png", b"\x89PNG", None),
        ("x.PDF", b"%PDF", None),
        ("x.svg", b"<?xml", None),
        ("x.doc", b"", r"x\.doc"),
        ("absent/x.png", b"", "cannot draw"),
    ],
)
def test_a_figure_has_the_form_of_its_suffix_or_is_refused_beforehand(
    tmp_path: Path, name: str, start: bytes, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if said is None:
        save_report_figure(summarise_answers(example_rows()), tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(start)
        monkeypatch.setattr("protokv.replay.figure.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=said or "need matplotlib"):
        check_figure_path(tmp_path / name)
