"""The figure is written, and refused before the run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from protokv.errors import ConfigError
from protokv.replay.figure import check_figure, save_figure
from protokv.replay.report import summarise
from tests.replay.rows import example_rows


def test_a_figure_has_a_panel_for_each_budget_and_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    made = []
    monkeypatch.setattr(figures.Figure, "savefig", lambda self, path, **_: made.append(self))
    rows = [*example_rows(), *(replace(row, budget=16) for row in example_rows())]
    save_figure(summarise(rows, lambda kind, dataset: kind), tmp_path / "x.png")
    (figure,) = made
    assert len(figure.axes) == 2 * (1 + 2)
    for axis in figure.axes:
        assert [tick.get_text() for tick in axis.get_xticklabels()] == ["0 s", "30 s", "2 min"]
        assert [line for line in axis.get_lines() if line.get_label() == "without watching"]
        full, window = (bars.lines[0] for bars in axis.containers)
        assert not set(full.get_xdata()) & set(window.get_xdata())


def test_a_figure_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    save_figure(summarise(example_rows()), tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_a_figure_that_cannot_be_drawn_is_refused_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"x\.doc"):
        check_figure("x.doc")
    with pytest.raises(ConfigError, match="no folder"):
        check_figure(tmp_path / "absent" / "x.png")
    monkeypatch.setattr("protokv.replay.figure.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="matplotlib"):
        check_figure("x.png")
