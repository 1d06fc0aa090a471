"""The published promises are those of the rows, and the rows are of the worlds that are named."""

from pathlib import Path

import pytest

from protokv.replay.rows import read_answer_rows
from samples.studies.forgotten.measure import SETS, report

FOLDER = Path(__file__).parents[2] / "studies" / "forgotten"


def test_rows_are_of_the_worlds_of_their_set() -> None:
    for name, (seeds, _, budget) in SETS.items():
        rows = read_answer_rows([FOLDER / f"{name}.jsonl.gz"])
        assert {row.video for row in rows} == {f"world-{seed}" for seed in seeds}
        assert {row.budget for row in rows} == {budget}


def test_the_page_has_the_shares_that_the_rows_give(capsys: pytest.CaptureFixture[str]) -> None:
    report(FOLDER)
    page = (FOLDER / "README.md").read_text().replace("**", "")
    lines = [line for line in capsys.readouterr().out.splitlines() if "| durable" in line]
    shares = [line.partition(" | ")[2].split(" | ", 2)[2] for line in lines if "(" in line]
    assert len(shares) == 9
    assert all(one in page for one in shares)
