"""Figure and page are written, need nothing else, and are refused before the run."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from protokv.errors import ConfigError
from protokv.replay.figure import check_figure, draw, save_figure, save_page
from protokv.replay.report import summarise
from tests.replay.rows import example_rows


def test_figure_and_page_need_nothing_else_and_the_page_says_how_it_was_made(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = summarise([*example_rows(), *(replace(row, budget=16) for row in example_rows())])
    save_figure(report, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    made = datetime(2026, 3, 4, 5, 6, tzinfo=UTC)
    save_page(report, tmp_path / "x.html", made=made, command="protokv replay --set 'a<b>=1'")
    page = (tmp_path / "x.html").read_text()
    assert "<svg" in page
    assert page.index("After 2 min: window") < page.index("<svg") < page.index("<h2>accuracy against delay")
    assert '<th class="short">window</th><td><span>16</span> </td>' in page
    assert not [mark for mark in ("<script", "src=", "@import", 'href="http') if mark in page]
    for said in (
        "m, float32",
        "2 a second",
        "2026-03-04 05:06 UTC",
        "costs: ",
        "state, KiB",
        "@media print",
        'name="viewport"',
    ):
        assert said in page, said
    assert "a&lt;b&gt;=1" in page
    assert "2 min" in page


def test_every_panel_has_its_floor_and_a_tick_of_its_own_for_each_delay() -> None:
    pytest.importorskip("matplotlib")
    figure = draw(summarise(example_rows()))
    panels = [axis for axis in figure.axes if axis.get_visible() and axis.get_xlabel() == "delay"]
    assert len(panels) == 1 + 2 + 2
    for axis in panels:
        assert [tick.get_text() for tick in axis.get_xticklabels()] == ["0 s", "30 s", "2 min"]
        assert [line for line in axis.get_lines() if line.get_label() == "without watching"]


def test_equal_curves_do_not_hide_each_other() -> None:
    pytest.importorskip("matplotlib")
    rows = [replace(row, correct=True) for row in example_rows()]
    axis = draw(summarise(rows)).axes[0]
    full, window = (bars.lines[0] for bars in axis.containers)
    assert not set(full.get_xdata()) & set(window.get_xdata())
    assert full.get_linewidth() > window.get_linewidth()


def test_a_figure_that_cannot_be_drawn_is_refused_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_figure(tmp_path / "x.svg")
    with pytest.raises(ConfigError, match=r"x\.doc"):
        check_figure("x.doc")
    with pytest.raises(ConfigError, match="no folder"):
        check_figure(tmp_path / "absent" / "x.png")
    monkeypatch.setattr("protokv.replay.figure.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="matplotlib"):
        check_figure()


def test_each_memory_differs_from_all_others_without_colours_and_equal_curves_are_named() -> None:
    pytest.importorskip("matplotlib")
    rows = [replace(row, memory=f"m{i}") for i in range(9) for row in example_rows() if row.memory == "window"]
    axis = draw(summarise(rows)).axes[0]
    looks = {(bars.lines[0].get_marker(), bars.lines[0].get_linestyle()) for bars in axis.containers}
    assert len(looks) == 9
    assert " ".join(axis.get_xlabel().split()) == "delay equal: " + " = ".join(f"m{i}" for i in range(9))


def test_a_page_marks_what_stands_on_few_questions_and_its_figures_take_the_colour_of_the_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    save_page(summarise(example_rows()), tmp_path / "few.html")
    page = (tmp_path / "few.html").read_text()
    assert 'class="few"' in page
    assert "fewer than 100 questions or 5 videos" in page
    assert "too few to be sure" in page
    assert page.count("<figure>") == 1 + 2 + 2
    assert "currentColor" in page
    assert "#1a1a1b" not in page
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids))

    many = [replace(row, video=str(v), question_id=f"{row.question_id}.{q}")
            for row in example_rows() for v in range(8) for q in range(20)]  # fmt: skip
    save_page(summarise(many), tmp_path / "many.html")
    page = (tmp_path / "many.html").read_text()
    assert 'class="few"' not in page
    assert "too few to be sure" not in page
