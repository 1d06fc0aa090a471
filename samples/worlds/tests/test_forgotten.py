"""The published promises are those of the rows, and the rows are of the worlds that are named."""

from pathlib import Path

import pytest

from protokv.replay.rows import read_answer_rows
from samples.studies.forgotten.measure import (
    SETS,
    TUNED,
    is_of_nothing,
    is_premise,
    report,
)

FOLDER = Path(__file__).parents[2] / "studies" / "forgotten"


def test_rows_are_of_the_worlds_of_their_set() -> None:
    for name, asked in SETS.items():
        rows = read_answer_rows([FOLDER / f"{name}.jsonl.gz"])
        assert {int(row.video.rpartition("-")[2]) for row in rows} == set(asked.seeds)
        assert {row.memory: row.budget for row in rows} == asked.budgets
        kept = {row.memory: row.config for row in rows}
        for memory, settings in TUNED.items():
            assert settings.items() <= kept.get(memory, settings).items()
        asked_of = [is_of_nothing(row) for row in rows if not is_premise(row)]
        assert sum(asked_of) / len(asked_of) == pytest.approx(0.5, abs=0.01)


def test_the_page_has_the_shares_that_the_rows_give(capsys: pytest.CaptureFixture[str]) -> None:
    report(FOLDER)
    page = (FOLDER / "README.md").read_text().replace("**", "")
    printed = capsys.readouterr().out.splitlines()
    found = [line.split(" | ", 2)[2] for line in printed if line.startswith("|")]
    assert len(found) > len(SETS)
    assert [one for one in found if one not in page] == []
