"""The published promises are those of the rows, and the rows are of the worlds that are named."""

from pathlib import Path

import pytest

from protokv.replay.rows import read_answer_rows
from samples.studies.forgotten.measure import SETS, is_of_nothing, report

APART = ("| order", "| counting", "| facts")
FOLDER = Path(__file__).parents[2] / "studies" / "forgotten"


def test_rows_are_of_the_worlds_of_their_set() -> None:
    for name, asked in SETS.items():
        rows = read_answer_rows([FOLDER / f"{name}.jsonl.gz"])
        assert {int(row.video.rpartition("-")[2]) for row in rows} == set(asked.seeds)
        assert {row.budget for row in rows} == {asked.budget}
        assert {row.memory for row in rows} == set(asked.memories)
        nothing = sum(map(is_of_nothing, rows)) / len(rows)
        assert nothing == pytest.approx(0.5 if asked.types else 0.35, abs=0.03)


def test_the_page_has_the_shares_that_the_rows_give(capsys: pytest.CaptureFixture[str]) -> None:
    report(FOLDER)
    page = (FOLDER / "README.md").read_text().replace("**", "")
    printed = capsys.readouterr().out.splitlines()
    lines = [line for line in printed if "| durable" in line]
    shares = [line.partition(" | ")[2].split(" | ", 2)[2] for line in lines if "(" in line]
    assert len(shares) == 11
    assert all(one in page for one in shares)
    apart = [line.split(" | ", 1)[1] for line in printed if line.startswith(APART)]
    assert len(apart) == 6
    assert all(one in page for one in apart)
