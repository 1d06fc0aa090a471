"""The figure is written, and refused before the run."""

from dataclasses import replace
from pathlib import Path

import pytest

from protokv.errors import ConfigError
from protokv.replay.figure import check_figure_path, save_report_figure
from protokv.replay.report import summarise_answers
from tests.replay.rows import example_rows


@pytest.mark.parametrize(
    ("delays", "wide"), [((0.0, 30.0, 120.0), False), ((0.0, 5.0, 3600.0), True)], ids=str
)
def test_a_figure_has_one_panel_with_a_curve_for_each_memory_and_budget_over_true_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delays: tuple[float, ...], wide: bool
) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    made = []
    monkeypatch.setattr(figures.Figure, "savefig", lambda self, path, **_: made.append(self))
    other = dict(zip((0.0, 30.0, 120.0), delays, strict=True))
    rows = [replace(row, delay_s=other[row.delay_s]) for row in example_rows()]
    rows += [replace(row, budget=16) for row in rows if row.memory != "full"]
    report = summarise_answers(rows, lambda kind, _: kind)
    save_report_figure(report, tmp_path / "x.png")
    ((axis,),) = (figure.axes for figure in made)
    assert axis.get_xscale() == ("symlog" if wide else "linear")
    assert list(axis.get_xticks()) == list(delays)
    assert [bars.get_label() for bars in axis.containers] == [
        "full",
        "window, 64 tokens",
        "window, 16 tokens",
    ]
    assert all(list(bars.lines[0].get_xdata()) == list(delays) for bars in axis.containers)
    assert [line for line in axis.get_lines() if line.get_label() == "without watching"]


@pytest.mark.parametrize(
    ("name", "start", "said"),
    [
        ("x.png", b"\x89PNG", None),
        ("x.PDF", b"%PDF", None),
        ("x.svg", b"<?xml", None),
        ("x.doc", b"", r"x\.doc"),
        ("absent/x.png", b"", "no folder"),
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
