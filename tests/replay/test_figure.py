"""The figure is written, and refused before the run."""

from dataclasses import replace
from pathlib import Path

import pytest

from protokv.errors import ConfigError
from protokv.replay.figure import check_figure_path, save_report_figure
from protokv.replay.report import summarise_answers
from tests.replay.rows import example_rows


def test_a_figure_has_a_curve_for_each_memory_and_budget_over_true_time(tmp_path: Path) -> None:
    delays = {0.0: 0.0, 30.0: 30.0, 120.0: 3600.0}
    rows = [replace(row, delay_s=delays[row.delay_s]) for row in example_rows()]
    rows += [replace(row, budget=16) for row in rows if row.memory == "window"]
    save_report_figure(summarise_answers(rows), tmp_path / "x.svg")
    drawn = (tmp_path / "x.svg").read_text()
    # A text is drawn as lines, below a comment that says it.
    for text in ("full", "window, 64 tokens", "window, 16 tokens", "without watching", "1 h"):
        assert f"<!-- {text} -->" in drawn


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
